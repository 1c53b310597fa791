"""Rollouts that run ahead of training by a fixed number of rollout batches (`rollout_lag`).

Rollout batch r is sampled with the weights at the moment when training of rollout batch r - lag begins (the first ones:
with those at the start). So which weights sample which prompts is fixed beforehand, and speed changes nothing. Differs
from asynchronous trainers that take what is ready first.

A thread runs the local phase of a rollout batch on a `Snapshot` of the models, without a collective (see
`local_collectives`). At the step that needs the rollout batch, the main thread joins the parts of all processes. So the
main thread alone runs collectives, in one order.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batching.prompt_order import StepDataset, StepRows
from ..config import GRPOConfig
from ..errors import ProcessError, RolloutError
from ..forward.snapshot import Snapshot, Weights
from ..runtime.clock import PhaseClock
from ..runtime.collectives import local_collectives
from .environments import Pools
from .local import LocalRollout, RolloutSettings
from .worker import RolloutWorker

_CLOSE_S, _EXIT_S = 5.0, 60.0  # a reward that hangs may not keep the run, or the program, for longer


@dataclass(frozen=True)
class CpuThreads:
    """CPU threads of training and of sampling ahead; None: as many as torch has."""

    training: int | None = None
    sampling: int | None = None


def divide_threads(args: GRPOConfig, device: torch.device) -> CpuThreads:
    """How training and sampling ahead share the CPU: by halves, where both compute on it."""
    if not args.rollout_lag:
        return CpuThreads()
    if args.bitwise_invariant:
        return CpuThreads(sampling=args.bitwise_threads)
    if device.type != "cpu":
        return CpuThreads()
    threads = torch.get_num_threads()
    sampling = max(1, threads // 2)
    return CpuThreads(max(1, threads - sampling), sampling)


@dataclass(frozen=True)
class Job:
    """A rollout batch that the thread samples.

    Attributes:
        step: the first optimizer step that trains it, from 0.
        rows: of this process.
        weights: those that sample it; settings: read from the trainer at submission.
        sampled: this process's part, and the seconds of the thread's phases.
    """

    step: int
    rows: StepRows
    weights: Weights
    settings: RolloutSettings
    sampled: Future[tuple[LocalRollout, dict[str, float]]]


class RolloutThread:
    """A thread that runs one piece of work after the other.

    Differs from an executor of one thread: work that hangs does not keep the program from ending.

    Args:
        threads: that torch computes with on the CPU; None: as many as elsewhere.
        device: a CUDA device gets a stream of its own.
    """

    def __init__(self, threads: int | None, device: torch.device) -> None:
        self._threads, self._device = threads, device
        kinds = sorted({"cpu", device.type})
        self._autocast = {k: torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[float], Any]] | None] = queue.SimpleQueue()
        context = contextvars.copy_context()  # rewards and tools see the context variables around `train()`
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True, name="rollouts")
        self._thread.start()

    def submit(self, work: Callable[[float], Any]) -> Future[Any]:
        """Run `work` after what was submitted before; it is passed the seconds for which the thread was idle."""
        future: Future[Any] = Future()
        self._work.put((future, work))
        return future

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if self._device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(self._device))
        since = time.perf_counter()
        with local_collectives(), contextlib.ExitStack() as stack:
            for kind, dtype in self._autocast.items():  # without a cache, as weights change inside
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            while (item := self._work.get()) is not None:
                future, work = item
                try:
                    result = work(time.perf_counter() - since)
                    if self._device.type == "cuda":
                        torch.cuda.current_stream(self._device).synchronize()
                except BaseException as error:  # of any kind; raised where the result is asked for
                    future.set_exception(error)
                else:
                    future.set_result(result)
                since = time.perf_counter()

    def close(self) -> None:
        """Drop waiting work, and wait some seconds for the running one; longer where the program ends.

        A thread that returns from torch to an interpreter that is being torn down aborts the process.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._work.get_nowait()
        self._work.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            atexit.register(self._thread.join, _EXIT_S)


@dataclass
class RolloutsAhead:
    """Submits rollout batches to the thread before they are due, and returns them when they are.

    Attributes:
        worker: of the thread; it samples with the models of `snapshot`.
        clock: of the main thread; it counts the seconds that one thread waits for the other.
        steps: the steps of the training set; max_steps: how many of them the run takes.
        send: sends the weights of the snapshot to a vLLM server, on all processes together; None without one. The
            server holds one set of weights at a time, so they are sent once it has answered all requests.
        jobs: submitted rollout batches, in order; the first stays until it is joined.
        pools: the thread's environments, to use again.
        own_tokenizer: the state of the trainer's tokenizer, and the thread's copies; None before the first.
    """

    worker: RolloutWorker
    snapshot: Snapshot
    thread: RolloutThread
    clock: PhaseClock
    steps: StepDataset
    max_steps: int
    send: Callable[[], None] | None = None
    jobs: deque[Job] = field(default_factory=deque, init=False)
    pools: Pools = field(default_factory=dict, init=False)
    own_tokenizer: tuple[Any, Any] | None = field(default=None, init=False)
    _sent: Weights | None = field(default=None, init=False)
    _next: int | None = field(default=None, init=False)  # the first step of the next rollout batch to submit

    def steps_to_submit(self, step: int, current: tuple[int, int] | None, lag: int) -> list[int]:
        """First steps of the rollout batches that the weights before `step` sample.

        Args:
            current: the name of the rollout batch that is trained on.
            lag: rollout batches after that of this step, at most.
        """
        while not self._starts_rollout(step):
            step -= 1
        if self._next is None:
            self._next = step + 1 if current == self.steps.request(step).name else step
        starts = itertools.islice(filter(self._starts_rollout, range(step, self.max_steps)), lag + 1)
        return [start for start in starts if start >= self._next]

    def _starts_rollout(self, step: int) -> bool:
        return self.steps.request(step).layout.starts_rollout

    def submit(self, step: int, weights: Weights, settings: RolloutSettings) -> None:
        """Let the thread sample the rollout batch that begins with an optimizer step."""
        rows = self.steps.rows(self.steps.request(step))
        self.jobs.append(self._job(step, rows, weights, settings))
        self._next = step + 1

    def _job(self, step: int, rows: StepRows, weights: Weights, settings: RolloutSettings) -> Job:
        if self.send is not None and self._sent is not weights:
            self.drain()
            self.snapshot.put_in_place(weights)
            self.send()
            self._sent = weights
        sampled = self.thread.submit(functools.partial(self._sample, rows, weights, settings))
        return Job(step, rows, weights, settings, sampled)

    def _sample(
        self, rows: StepRows, weights: Weights, settings: RolloutSettings, idle: float
    ) -> tuple[LocalRollout, dict[str, float]]:
        """This process's part of a rollout batch, and the seconds of its phases; runs on the thread."""
        worker, snapshot = self.worker, self.snapshot
        snapshot.put_in_place(weights)
        if settings.sampling.hooks.rewards:  # the main thread reads these environments while the thread resets others
            self.pools.clear()
        local = worker.sample(rows, settings)
        return local, worker.clock.take() | {"wait_train": idle}

    def part_of(self, rows: StepRows) -> LocalRollout:
        """This process's part of a rollout batch; an error of the thread is its `failure`.

        Args:
            rows: empty for the rollout batch of the step, which was sampled ahead; for dynamic sampling further
                prompts, which the same weights sample now.
        """
        job, request = self.jobs[0], rows.request
        if rows:
            job = self._job(job.step, rows, job.weights, job.settings)
        elif (submitted := job.rows.request.name) != request.name:
            raise RolloutError(
                f"the loader is at (epoch, rollout batch) {request.name}, and what was sampled ahead is for {submitted}"
                "; a subclass or a callback has put sampling out of step with the loader."
            )
        self._wait_for([job])
        error = job.sampled.exception()
        if error is not None:  # also one that would end the program, so that all processes learn of it
            failure = error if isinstance(error, Exception) else ProcessError(f"the sampling thread ended by {error!r}")
            return LocalRollout(request, job.settings, failure=failure)
        local, seconds = job.sampled.result()
        self.clock.add(seconds)
        return local

    def drain(self) -> None:
        """Wait until the thread has no work; once all processes have done so, a server may be sent other weights."""
        self._wait_for(self.jobs)
        self._sent = None

    def _wait_for(self, jobs: Iterable[Job]) -> None:
        with self.clock.phase("wait_rollout"):
            wait([job.sampled for job in jobs])

    def close(self) -> None:
        """Stop sampling, and drop what was sampled."""
        self.snapshot.abandoned.set()
        self.thread.close()
        self.jobs.clear()
