"""Rollouts that run ahead of training by a fixed number of rollout batches (`rollout_lag`).

Rollout batch r is sampled with the weights at the moment when training of rollout batch r - lag begins (the first ones:
with those at the start). So which weights sample which prompts is fixed beforehand, and speed changes nothing. Differs
from asynchronous trainers that take what is ready first.

A thread runs the local phase of a rollout batch on a `Snapshot` of the models, without a collective
(`runtime.collectives.alone`). At the step that needs the rollout batch, the main thread joins the parts of all
processes. So the main thread alone runs collectives, in one order.
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
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batching.prompt_order import StepDataset, StepRows
from ..errors import ConfigError, RolloutError
from ..forward.snapshot import Snapshot, Weights
from ..runtime.collectives import alone, gather_lists
from .local import LocalRollout, Terms
from .worker import RolloutWorker

_CLOSE_S, _EXIT_S = 5.0, 60.0  # a reward that hangs may not keep the run, or the program, for longer


class StoppedWaiting(Exception):
    """The run was asked to stop while it waited for a rollout batch; raised on every process, between two steps."""


@dataclass(frozen=True)
class SampledAhead:
    """A process's part of a rollout batch, as the thread returns it.

    Attributes:
        local: with its log-probabilities and rewards.
        forms: which forward each model ran; the same on every process.
        seconds: of its phases.
        idle: seconds that the thread had no work before.
    """

    local: LocalRollout
    forms: tuple[str, ...]
    seconds: dict[str, float]
    idle: float


@dataclass(frozen=True)
class Job:
    """A rollout batch that the thread samples.

    Attributes:
        step: the first optimizer step that trains it, from 0.
        rows: of this process.
        weights: that sample it; terms: what else was read of the trainer when it was submitted.
    """

    step: int
    rows: StepRows
    weights: Weights
    terms: Terms
    sampled: Future[SampledAhead]

    @property
    def name(self) -> tuple[int, int]:
        """Of the rollout batch: its epoch and its index in the epoch."""
        return self.rows.request.epoch, self.rows.request.layout.rollout


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
        with alone(), contextlib.ExitStack() as stack:
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
        form_of: gives the forward that a model runs.
        steps: the steps of the training set.
        max_steps: the number of optimizer steps of the run.
        stopping: whether this process was asked to stop.
        send: sends the weights of the snapshot to a vLLM server, on all processes together; None without one. The
            server holds one set of weights at a time, so they are sent once it has answered all requests.
        jobs: submitted rollout batches, in order; the first of them until its rollout batch is held.
        training_waited, thread_waited: seconds in this step that training waited, and the thread before it.
    """

    worker: RolloutWorker
    snapshot: Snapshot
    form_of: Callable[[Any], str]
    thread: RolloutThread
    steps: StepDataset
    max_steps: int
    stopping: Callable[[], bool]
    send: Callable[[], None] | None = None
    jobs: deque[Job] = field(default_factory=deque, init=False)
    training_waited: float = field(default=0.0, init=False)
    thread_waited: float = field(default=0.0, init=False)
    _sent: Weights | None = field(default=None, init=False)
    _next: int | None = field(default=None, init=False)  # the first step of the next rollout batch to submit

    def for_checkpoint(self) -> list[tuple[int, Weights]]:
        """The rollout batches that are not held yet: their first steps, and the weights that sample them."""
        return [(job.step, job.weights) for job in self.jobs]

    def steps_to_submit(self, step: int, held: tuple[int, int] | None, lag: int) -> list[int]:
        """First steps of the rollout batches that the weights before an optimizer step sample; drops the job of `held`.

        Args:
            held: the rollout batch that is trained on, by its epoch and its index in the epoch.
            lag: rollout batches after that of this step, at most.
        """
        while self.jobs and self.jobs[0].name == held:
            self.jobs.popleft()
        while not self._starts_rollout(step):
            step -= 1
        if self._next is None:
            request = self.steps.request(step)
            self._next = step + 1 if held == (request.epoch, request.layout.rollout) else step
        starts = itertools.islice(filter(self._starts_rollout, range(step, self.max_steps)), lag + 1)
        return [start for start in starts if start >= self._next]

    def _starts_rollout(self, step: int) -> bool:
        return self.steps.request(step).layout.starts_rollout

    def submit(self, step: int, weights: Weights, terms: Terms) -> None:
        """Let the thread sample the rollout batch that begins with an optimizer step."""
        rows = self.steps.rows(self.steps.request(step))
        self.jobs.append(self._job(step, rows, weights, terms))
        self._next = step + 1

    def _job(self, step: int, rows: StepRows, weights: Weights, terms: Terms) -> Job:
        if self.send is not None and self._sent is not weights:
            self.drain()
            self.snapshot.put_in_place(weights)
            self.send()
            self._sent = weights
        sampled = self.thread.submit(functools.partial(self._sample, rows, weights, terms))
        return Job(step, rows, weights, terms, sampled)

    def _sample(self, rows: StepRows, weights: Weights, terms: Terms, idle: float) -> SampledAhead:
        """This process's part of a rollout batch; runs on the thread."""
        worker, snapshot = self.worker, self.snapshot
        snapshot.put_in_place(weights)
        if terms.hooks.rewards:  # the main thread reads these environments while the thread resets others
            worker.environments.pools = {name: [] for name in worker.environments.factories}
        local = worker.sample(rows, terms)
        models = [model for model in (snapshot.policy, snapshot.reference) if model is not None]
        return SampledAhead(local, tuple(map(self.form_of, models)), worker.clock.take(), idle)

    def part_of(self, rows: StepRows) -> SampledAhead:
        """This process's part of a rollout batch, once every process has its part; all processes come here together.

        Args:
            rows: none: the rollout batch of the step, which was sampled ahead; else further prompts for it (dynamic
                sampling), which the same weights sample.
        """
        due, request = self.jobs[0], rows.request
        if rows:
            return self._result(self._job(due.step, rows, due.weights, due.terms))
        if due.name != (request.epoch, request.layout.rollout):
            raise RolloutError(
                f"the loader is at epoch {request.epoch}, rollout batch {request.layout.rollout}, and what was sampled "
                f"ahead is for {due.name}; a subclass or a callback has moved one of the two."
            )
        sampled = self._result(due)
        self.thread_waited = sampled.idle
        return sampled

    def take_waits(self) -> dict[str, float]:
        """The seconds that training waited for the thread in this step, and the thread for work; without zeros."""
        waits = {"time/wait_train": self.thread_waited, "time/wait_rollout": self.training_waited}
        self.thread_waited = self.training_waited = 0.0
        return {name: seconds for name, seconds in waits.items() if seconds}

    @property
    def sampled_at(self) -> int:
        """Optimizer steps before the weights that sample the rollout batch that is due."""
        return self.jobs[0].weights.step

    def drain(self) -> None:
        """Wait until no thread of any process has work; a server may then be sent other weights."""
        for job in self.jobs:
            self._result(job)
        self._sent = None

    def _result(self, job: Job) -> SampledAhead:
        """The result of a job, once every process has its own.

        Raises:
            StoppedWaiting: on every process, where one was asked to stop meanwhile.
            RolloutError: where another process failed; the error itself on the one that did.
        """
        start = time.perf_counter()
        while not (done := bool(wait([job.sampled], timeout=0.1).done)) and not self.stopping():
            pass
        self.training_waited += time.perf_counter() - start
        error = job.sampled.exception() if done else None
        failure = None if error is None else f"{type(error).__name__}: {error}"
        forms = job.sampled.result().forms if done and error is None else ()
        states = gather_lists([(done, failure, forms)])
        if error is not None:
            raise error
        for rank, (_, failure, _) in enumerate(states):
            if failure is not None:
                raise RolloutError(f"process {rank} could not make its part of a rollout batch: {failure}")
        if not all(done for done, _, _ in states):
            raise StoppedWaiting
        if len({forms for _, _, forms in states}) > 1:
            raise ConfigError(
                "processes disagree on how completions run through the model, as some of them compare equal on one "
                "process alone; set forward='padded'."
            )
        return job.sampled.result()

    def close(self) -> None:
        """Stop sampling, and drop what was sampled."""
        self.snapshot.abandoned.set()
        self.thread.close()
        self.jobs.clear()
