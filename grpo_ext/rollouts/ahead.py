"""Rollouts that run ahead of training by a fixed number of rollout batches (`rollout_lag`).

Rollout batch r is sampled with the weights that were there when training of rollout batch r - lag began (the first
ones: with those at the start), so which weights sample which prompts is fixed beforehand and speed changes nothing.
Differs from asynchronous trainers that take what is ready first.

A thread runs the local phase of a rollout batch on a `Snapshot` of the models, without a collective
(`runtime.collectives.alone`). At the step that needs it, the main thread joins what the threads of all processes have
made. So collectives are run by the main thread alone, in one order.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..batching.prompt_order import StepDataset, StepRows
from ..errors import ConfigError, RolloutError
from ..forward.shards import ShardedSnapshot
from ..forward.snapshot import Snapshot, Weights
from ..runtime.collectives import alone, gather_lists
from .local import LocalRollout, Terms

_AT_EXIT_S = 60.0  # a reward that hangs may not keep the program for longer


class StoppedWaiting(Exception):
    """The run was asked to stop while it waited for a rollout batch; raised on every process, between two steps."""


@dataclass(frozen=True)
class SampledAhead:
    """A process's part of a rollout batch.

    Attributes:
        local: with its rewards, and log-probabilities where the thread runs forwards.
        forms: how the models ran, the same on every process.
        seconds: that its phases took.
        idle: seconds that the thread had waited for work before.
    """

    local: LocalRollout
    forms: tuple[str, ...]
    seconds: dict[str, float]
    idle: float


@dataclass(frozen=True)
class Job:
    """A rollout batch that is being made.

    Attributes:
        step: the optimizer step that it is for first, from 0.
        rows: of this process.
        weights: that sample it; terms: what else was read of the trainer when it was begun.
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
    """A thread that does one thing after the other; one that hangs does not keep the program from ending.

    Args:
        threads: that torch computes with on the CPU; None: as many as elsewhere.
        device: a CUDA device gets a stream of its own.
    """

    def __init__(self, threads: int | None, device: torch.device) -> None:
        self._threads, self._device = threads, device
        kinds = sorted({"cpu", device.type})
        self._autocast = {k: torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[float], Any]] | None] = queue.SimpleQueue()
        inside = contextvars.copy_context()  # what the caller has set is set for rewards and tools
        self._thread = threading.Thread(target=inside.run, args=(self._run,), daemon=True, name="rollouts")
        self._thread.start()

    def submit(self, work: Callable[[float], Any]) -> Future[Any]:
        """Do it after what was submitted before; it is told for how many seconds there was nothing to do."""
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
                idle = time.perf_counter() - since
                try:
                    result = work(idle)
                    if self._device.type == "cuda":
                        torch.cuda.current_stream(self._device).synchronize()
                except BaseException as error:  # of any kind; raised where the result is asked for
                    future.set_exception(error)
                else:
                    future.set_result(result)
                since = time.perf_counter()

    def close(self, seconds: float) -> None:
        """Do nothing more than what runs now, and wait for that, for some time; longer where the program ends.

        A thread that comes back from torch to an interpreter that is being torn down aborts the process.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._work.get_nowait()
        self._work.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            atexit.register(self._thread.join, _AT_EXIT_S)


class RolloutsAhead:
    """Begins with rollout batches before they are due, and hands them over when they are.

    Args:
        steps: the steps of the training set.
        last: the number of optimizer steps of the run.
        sample: on the thread: this process's part of a rollout batch, by these weights and terms.
        terms: what is read of the trainer when a rollout batch is begun, with its progress as it was when these weights
            were taken.
        stopping: whether this process was asked to stop.
        send: sends the weights that are in place to a server that samples, on all processes together; None without
            one. It holds one set of weights at a time, so they are sent once it has answered all requests.
    """

    def __init__(
        self,
        steps: StepDataset,
        last: int,
        snapshot: Snapshot | ShardedSnapshot,
        thread: RolloutThread,
        sample: Callable[[StepRows, Weights, Terms, float], SampledAhead],
        terms: Callable[[Weights], Terms],
        stopping: Callable[[], bool],
        send: Callable[[], None] | None = None,
    ) -> None:
        self.steps, self.last, self.snapshot, self.thread = steps, last, snapshot, thread
        self.sample, self.terms, self.stopping, self.send = sample, terms, stopping, send
        self.waited = 0.0  # seconds, since it was last set to zero
        self.idle = 0.0  # seconds that the thread had waited for the work that is due
        self._sent: Weights | None = None
        self.jobs: deque[Job] = deque()  # the first of them until its rollout batch is held
        self._next: int | None = None  # the first step of the next rollout batch to begin with

    def _starts(self, step: int) -> Iterator[int]:
        """The steps from `step` on that begin a rollout batch."""
        return (s for s in range(step, self.last) if self.steps.request(s).layout.starts_rollout)

    def resume(self, waiting: Sequence[tuple[int, Weights]]) -> None:
        """Begin again what a checkpoint found on its way: the first steps of rollout batches, and their weights."""
        for step, weights in waiting:
            self._begin(step, self.snapshot.own(weights))

    def for_checkpoint(self) -> list[tuple[int, Weights]]:
        """What is on its way, with whole weights; all processes ask together."""
        whole = {id(job.weights): self.snapshot.whole(job.weights) for job in self.jobs}
        return [(job.step, whole[id(job.weights)]) for job in self.jobs]

    def begin(self, progress: dict[str, Any], held: tuple[int, int] | None, lag: int) -> None:
        """Begin with what the weights that are there now, before an optimizer step, have to sample.

        Args:
            progress: of the run (see `Weights`).
            held: the rollout batch that is there already, by its epoch and its index in the epoch.
            lag: rollout batches after that of this step to begin with, at most.
        """
        while self.jobs and self.jobs[0].name == held:
            self.jobs.popleft()
        begin = progress["global_step"]
        while not self.steps.request(begin).layout.starts_rollout:
            begin -= 1
        if self._next is None:
            request = self.steps.request(begin)
            self._next = begin + 1 if held == (request.epoch, request.layout.rollout) else begin
        weights: Weights | None = None
        for start in itertools.islice(self._starts(begin), lag + 1):
            if start >= self._next:
                weights = weights or self.snapshot.take(progress)
                self._begin(start, weights)

    def _begin(self, step: int, weights: Weights) -> None:
        rows = self.steps.rows(self.steps.request(step))
        self.jobs.append(self._submit(step, rows, weights, self.terms(weights)))
        self._next = step + 1

    def _submit(self, step: int, rows: StepRows, weights: Weights, terms: Terms) -> Job:
        if self.send is not None and self._sent is not weights:
            self.drain()
            with self.snapshot.in_place(weights):
                self.send()
            self._sent = weights

        def work(idle: float) -> SampledAhead:
            return self.sample(rows, weights, terms, idle)

        return Job(step, rows, weights, terms, self.thread.submit(work))

    def part_of(self, rows: StepRows) -> SampledAhead:
        """This process's part of a rollout batch, once every process has its part; all processes come here together.

        Args:
            rows: none: the rollout batch of the step, which was sampled ahead; else further prompts for it (dynamic
                sampling), which the same weights sample.
        """
        due, request = self.jobs[0], rows.request
        if rows:
            return self._settled(self._submit(due.step, rows, due.weights, due.terms))
        if due.name != (request.epoch, request.layout.rollout):
            raise RolloutError(
                f"the loader is at epoch {request.epoch}, rollout batch {request.layout.rollout}, and what was sampled "
                f"ahead is for {due.name}; a subclass or a callback has moved one of the two."
            )
        sampled = self._settled(due)
        self.idle = sampled.idle
        return sampled

    def take_waits(self) -> dict[str, float]:
        """The seconds that training waited for the thread in this step, if any, and the thread for work."""
        waits = {"time/wait_train": self.idle, "time/wait_rollout": self.waited}
        self.idle = self.waited = 0.0
        return {name: seconds for name, seconds in waits.items() if seconds}

    @property
    def sampled_at(self) -> int:
        """Optimizer steps made before the weights that sample what is due."""
        return self.jobs[0].weights.step

    def weights_of_due(self) -> AbstractContextManager[None]:
        """Inside, models whose weights processes share compute with those that have sampled what is due."""
        return self.snapshot.in_place(self.jobs[0].weights)

    def drain(self) -> None:
        """Wait until nothing runs on the thread of any process; a server may then be sent other weights."""
        for job in self.jobs:
            self._settled(job)
        self._sent = None

    def _settled(self, job: Job) -> SampledAhead:
        """What a job made, once every process is done with its part.

        Raises:
            StoppedWaiting: on every process, where one was asked to stop meanwhile.
            RolloutError: where another process failed; the error itself on the one that did.
        """
        start = time.perf_counter()
        while not (done := bool(wait([job.sampled], timeout=0.1).done)) and not self.stopping():
            pass
        self.waited += time.perf_counter() - start
        error = job.sampled.exception() if done else None
        failure = None if error is None else f"{type(error).__name__}: {error}"
        forms = job.sampled.result().forms if done and error is None else ()
        everyone = gather_lists([(done, failure, forms)])
        if error is not None:
            raise error
        for rank, (_, failure, _) in enumerate(everyone):
            if failure is not None:
                raise RolloutError(f"process {rank} could not make its part of a rollout batch: {failure}")
        if not all(done for done, _, _ in everyone):
            raise StoppedWaiting
        if len({forms for _, _, forms in everyone}) > 1:
            raise ConfigError(
                "processes disagree on how completions run through the model, as some of them compare equal on one "
                "process alone; set forward='padded'."
            )
        return job.sampled.result()

    def close(self) -> None:
        """End what is on its way."""
        self.snapshot.abandoned.set()
        self.thread.close(seconds=5.0)
        self.jobs.clear()
        self._sent = None
