"""Rollouts that run ahead of training by a fixed number of rollout batches (`rollout_lag`).

Rollout batch r is sampled with the weights at the moment when training of rollout batch r - lag begins (the first ones:
with those at the start). So which weights sample which prompts is fixed beforehand, and speed changes nothing. Differs
from asynchronous trainers that take what is ready first.

A thread runs the local phase of a rollout batch on a `Snapshot` of the models, without a collective (see
`local_collectives`). At the step that needs the rollout batch, the main thread joins the parts of all processes. So
only the main thread runs collectives, in one order.

First the thread and its queue, then what builds them from a trainer's models. Called by `Rollouts`.
"""

import atexit
import contextlib
import contextvars
import copy
import functools
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..batching.prompt_order import StepDataset, StepRows
from ..config import GRPOConfig
from ..errors import ProcessError, RolloutError
from ..forward.snapshot import Snapshot, Weights
from ..runtime.clock import PhaseClock
from ..runtime.collectives import local_collectives
from ..view import TrainerView
from .chat import Chat
from .local import LocalRollout, RolloutSettings
from .tools import Environments, Pools
from .worker import RolloutWorker

# what reward functions may read of the Trainer's state, as it was when the weights were taken
PROGRESS = ("global_step", "epoch", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")
_CLOSE_S, _EXIT_S = 5.0, 60.0  # a reward that hangs must not keep the run, or the program, longer


def divide_threads(args: GRPOConfig, device: torch.device) -> tuple[int | None, int | None]:
    """CPU threads of training and of sampling ahead: halves, where both compute on it; None: as many as torch has."""
    if not args.rollout_lag:
        return None, None
    if args.bitwise_invariant:
        return None, args.bitwise_threads
    if device.type != "cpu":
        return None, None
    threads = torch.get_num_threads()
    sampling = max(1, threads // 2)
    return max(1, threads - sampling), sampling


@dataclass(frozen=True)
class Job:
    """A rollout batch that the thread samples."""

    step: int  # the first optimizer step that trains it, from 0
    rows: StepRows  # of this process
    weights: Weights  # that sample it
    settings: RolloutSettings  # read from the trainer at submission
    # this process's part, and the seconds of the thread's phases
    sampled: Future[tuple[LocalRollout, dict[str, float]]]


class RolloutThread:
    """A thread that runs one piece of work after the other.

    Differs from an executor of one thread: work that hangs does not keep the program from ending. `threads` are those
    that torch computes with on the CPU (None: as many as elsewhere). A CUDA device gets a stream of its own.
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
    """Submits rollout batches to the thread before they are due, and returns them when they are."""

    view: TrainerView
    settings_now: Callable[[], RolloutSettings]  # of a rollout batch that begins now
    worker: RolloutWorker  # of the thread; it samples with the models of `snapshot`
    snapshot: Snapshot
    thread: RolloutThread
    clock: PhaseClock  # of the main thread; it counts the seconds that one thread waits for the other
    steps: StepDataset
    # sends the weights of the snapshot to a vLLM server, on all processes together; None without one. The server holds
    # one set of weights at a time, so they are sent once it has answered all requests
    send: Callable[[], None] | None
    _jobs: deque[Job] = field(default_factory=deque)  # submitted rollout batches, in order
    _pools: Pools = field(default_factory=dict)  # the thread's environments, to use again
    # the state of the trainer's tokenizer, and the thread's copies; None before the first
    _tokenizers: tuple[Any, Any] | None = None
    _taken: Weights | None = None  # the latest
    _sent: Weights | None = None
    _next: int | None = None  # the first step of the next rollout batch to submit

    @property
    def submitted(self) -> list[tuple[int, Weights]]:
        """The rollout batches that are to come: their first steps, and the weights that sample them."""
        return [(job.step, job.weights) for job in self._jobs]

    def submit_due(self, current: tuple[int, int] | None, lag: int) -> None:
        """Submit the rollout batches that the current weights sample: this step's, and at most `lag` after it.

        `current` is the name of the rollout batch that is trained on.
        """
        state = self.view.state
        for step in self._steps_to_submit(state.global_step, current, lag):
            if self._taken is None or self._taken.step != state.global_step:
                self._taken = self.snapshot.copy_weights({name: getattr(state, name) for name in PROGRESS})
            self.submit(step, self._taken)

    def _steps_to_submit(self, step: int, current: tuple[int, int] | None, lag: int) -> list[int]:
        """First steps of the rollout batches that the weights before `step` sample."""

        def starts_rollout(step: int) -> bool:
            return self.steps.request(step).layout.starts_rollout

        while not starts_rollout(step):
            step -= 1
        if self._next is None:
            self._next = step + 1 if current == self.steps.request(step).name else step
        starts = itertools.islice(filter(starts_rollout, range(step, self.view.state.max_steps)), lag + 1)
        return [start for start in starts if start >= self._next]

    def submit(self, step: int, weights: Weights) -> None:
        rows = self.steps.rows(self.steps.request(step))
        self._jobs.append(self._job(step, rows, weights, self._settings(weights)))
        self._next = step + 1

    def _settings(self, weights: Weights) -> RolloutSettings:
        """The settings as they are now, with the progress of the weights; none changes later."""
        state = copy.copy(self.view.state)
        history = [entry for entry in state.log_history if entry.get("step", 0) <= weights.step]
        vars(state).update({**weights.progress, "log_history": history})
        settings = self.settings_now()
        config, processors = copy.deepcopy((settings.sampler.config, settings.functions.processing_classes))
        sampler = replace(settings.sampler, config=config, engine=self.worker.engine)
        shared = settings.toolbox.environments  # whose instances the main thread uses
        environments = Environments(shared.factories, self._pools, shared.retired)
        toolbox, chat = replace(settings.toolbox, environments=environments), self._own_chat(settings.chat)
        return replace(
            settings,
            sampler=sampler,
            toolbox=toolbox,
            chat=chat,
            functions=replace(settings.functions, processing_classes=processors),
            state=state,
        )

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
        worker, snapshot = self.worker, self.snapshot
        snapshot.put_in_place(weights)
        if settings.own_rewards:  # the main thread reads these environments while the thread resets others
            self._pools.clear()
        local = worker.sample(rows, settings)
        return local, worker.clock.pop_seconds() | {"wait_train": idle}

    def pop_due(self) -> Job:
        """The next rollout batch to train on, which is not among the submitted ones any more."""
        return self._jobs.popleft()

    def part_of(self, job: Job, rows: StepRows) -> LocalRollout:
        """This process's part of a rollout batch; an error of the thread is its `failure`.

        `rows` are empty for the rollout batch itself, and further prompts of dynamic sampling, which the same weights
        sample now.
        """
        request = rows.request
        if rows:
            job = self._job(job.step, rows, job.weights, job.settings)
        elif (submitted := job.rows.request.name) != request.name:
            raise RolloutError(
                f"the loader is at (epoch, rollout batch) {request.name}, and what was sampled ahead is for {submitted}"
                "; a subclass or a callback put sampling out of step with the loader."
            )
        self._wait_for([job])
        error = job.sampled.exception()
        if error is not None:  # also one that would end the program, so that all processes learn of it
            failure = error if isinstance(error, Exception) else ProcessError(f"the sampling thread ended by {error!r}")
            return LocalRollout(request, job.settings, failure=failure)
        local, seconds = job.sampled.result()
        self.clock.add(seconds)
        return local

    def _own_chat(self, chat: Chat) -> Chat:
        """The chat with a copy of the tokenizer, which threads may not share; copied again after a change."""
        parts = chat.processing_class, chat.tokenizer
        state = parts, [dict(vars(part)) for part in parts], chat.tokenizer.special_tokens_map, len(chat.tokenizer)
        if self._tokenizers is None or self._tokenizers[0] != state:
            self._tokenizers = state, copy.deepcopy(parts)
        processing_class, tokenizer = self._tokenizers[1]
        return replace(chat, processing_class=processing_class, tokenizer=tokenizer)

    def drain(self) -> None:
        """Wait until the thread has no work; once all processes have done so, a server may be sent other weights."""
        self._wait_for(self._jobs)
        self._sent = None

    def _wait_for(self, jobs: Iterable[Job]) -> None:
        with self.clock.phase("wait_rollout"):
            wait([job.sampled for job in jobs])

    def close(self) -> None:
        self.snapshot.abandoned.set()
        self.thread.close()
        self._jobs.clear()


def describe_lag(view: TrainerView) -> str | None:
    """The lag of a run and the memory that the weights of earlier steps take, in words; None without a lag."""
    lag, reference = view.args.rollout_lag, view.ref_model
    if not lag:
        return None
    moved = reference.parameters() if reference is not None and view.args.sync_ref_model else ()
    trained = [p for p in view.model.parameters() if p.requires_grad]
    mebibytes = (lag + 1) * sum(p.nbytes for p in (*trained, *moved)) / 2**20
    return f"{lag} rollout batch(es); {mebibytes:,.0f} MiB, the trained weights up to {lag + 1} times"
