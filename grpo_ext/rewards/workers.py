"""Processes that call reward functions beside training (`reward_workers`), and can be killed.

loky starts, watches and kills them: fresh interpreters that do not import the training script, so a script needs no
`if __name__ == "__main__"`. Every worker is an executor of one process, so killing one call ends no other. Used by
rewards.runner; what runs in a worker is rewards.worker.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, NamedTuple

from loky import ProcessPoolExecutor
from loky.process_executor import BrokenProcessPool, ShutdownExecutorError

from ..errors import ConfigError
from .calls import RewardCall
from .guard import CallTimeout
from .worker import RECORDERS, begin, load, pack, score

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_ENVIRONMENT = {
    **dict.fromkeys(_ONE_THREAD, "1"),
    **dict.fromkeys(_DEVICES, ""),
    "LOKY_MAX_MEMORY_LEAK_SIZE": "1e15",  # a function may load a model at its first call
}


class WorkerDied(RuntimeError):
    """The process of a call ended before it answered."""

    remedy = (
        "reward_retries makes the call again, reward_on_failure='none' goes on without, and fewer reward_workers take "
        "less memory."
    )


class PackedFunction(NamedTuple):
    """A reward function for other processes. Keeps `function` alive, so that its `id` is not reused."""

    name: str
    function: Callable[..., Any]
    packed: bytes


class RewardWorker:
    """One process, used by one thread at a time. Starts at its first call, and again after it has ended."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """What a function of rewards.worker returns.

        Args:
            seconds: that it may take; None: any time.

        Raises:
            CallTimeout: it took longer; the process is killed.
            WorkerDied: the process ended.
        """
        executor = self._executor
        if executor is None:
            executor = self._executor = ProcessPoolExecutor(1, timeout=None, env=_ENVIRONMENT, initializer=begin)
        try:
            return executor.submit(function, *arguments).result(seconds)
        except (BrokenProcessPool, ShutdownExecutorError) as error:
            self.kill()
            exit_codes = str(error).partition("The exit codes of the workers are ")[2].partition("\n")[0]
            raise WorkerDied(f"its process has ended: {exit_codes.strip('{}') or 'no exit code'}") from None
        except FutureTimeout:
            self.kill()
            raise CallTimeout(seconds, "reward_timeout") from None

    def kill(self) -> None:
        """End the process and those that it has started; from any thread."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(kill_workers=True)


def _load_error(packed: bytes, worker: RewardWorker) -> str | None:
    try:
        failure = worker.run(load, packed)
    except WorkerDied as error:
        return str(error)
    return None if failure is None else str(failure)


class RewardWorkers:
    """The processes of one training process, each asked by a thread of its own.

    Args:
        number: of processes.
        seed: of the run.

    Attributes:
        ended: set by `kill`, for the jobs of that time; what is submitted afterwards has another one.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed = number, seed
        self.ended = threading.Event()
        self._functions: dict[int, PackedFunction] = {}  # by `id`
        self._workers = [RewardWorker() for _ in range(number)]
        self._idle: SimpleQueue[RewardWorker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # a worker ends with the thread that started it (rewards.worker.begin), so these live as long as this object
        self._threads = ThreadPoolExecutor(number, "reward worker")

    def add(self, function: Callable[..., Any], name: str) -> None:
        """Be ready to call a function.

        Raises:
            ConfigError: it cannot be sent to another process.
        """
        if id(function) in self._functions:
            return
        try:
            self._functions[id(function)] = PackedFunction(name, function, pack(function))
        except Exception as error:
            raise ConfigError(
                f"reward function '{name}' cannot be sent to the processes of reward_workers={self.number} "
                f"({type(error).__name__}: {error}); let it open files and connections and make clients and locks at "
                "its first call, or set reward_workers=0."
            ) from error

    def start(self) -> None:
        """Start the processes with the functions that were taken, all at once; before any job.

        Raises:
            ConfigError: a function cannot be loaded there.
        """
        for packed in self._functions.values():
            load_in = functools.partial(_load_error, packed.packed)
            for error in self._threads.map(load_in, self._workers):
                if error is not None:
                    self.kill()
                    raise ConfigError(
                        f"reward function '{packed.name}' cannot be loaded in a process of reward_workers "
                        f"({error}), a fresh interpreter without an accelerator; define it in the script or in a "
                        "module that can be imported, let it make what it needs at its first call, or set "
                        "reward_workers=0."
                    )

    def submit(self, job: Callable[[Callable[..., Any], threading.Event], Any]) -> Future[Any]:
        """Do a job with the next process that is free: `job(score, ended)`, see `_score` and `ended`."""
        return self._threads.submit(self._with_worker, job, self.ended)

    def _with_worker(self, job: Callable[[Callable[..., Any], threading.Event], Any], ended: threading.Event) -> Any:
        worker = self._idle.get()
        try:
            if ended.is_set():
                raise WorkerDied("the reward workers have been ended")
            return job(functools.partial(self._score, worker), ended)
        finally:
            self._idle.put(worker)

    def _score(
        self,
        worker: RewardWorker,
        function: Callable[..., Any],
        call: RewardCall,
        keywords: dict[str, Any],
        seconds: float | None,
    ) -> Any:
        """What a function returns for a chunk; what it logs goes to the recorders in `keywords`.

        Args:
            seconds: that it may take; None: any time.

        Raises:
            CallTimeout, WorkerDied: see `RewardWorker.run`.
            Exception: what the function raised, by its name and in words.
        """
        recorders = {name: keywords[name] for name in RECORDERS if callable(keywords.get(name))}
        plain = {name: value for name, value in keywords.items() if name not in recorders}
        state = plain.get("trainer_state")
        if (step := getattr(state, "global_step", None)) is not None:
            # its class would import transformers there, and its log grows with the run
            plain["trainer_state"] = SimpleNamespace(**{**vars(state), "log_history": []})
        # random numbers of a call do not depend on the worker, the split or an attempt that failed
        seed = zlib.crc32(f"{self.seed} {step} {call.number} {call.first}".encode())
        request = (score, self._functions[id(function)].packed, seed, plain, list(recorders))
        try:
            rewards, logged, error = worker.run(*request, seconds=seconds)
        except WorkerDied as died:
            if "SIGTERM" not in str(died):
                raise
            # a cluster tells all processes that the run is to end, and the training process decides when
            rewards, logged, error = worker.run(*request, seconds=seconds)
        if error is not None:
            raise error.as_exception()
        for recorder, name, value in logged:
            recorders[recorder](name, value)
        return rewards

    def kill(self) -> None:
        """End all processes and the jobs that were submitted; the next call starts processes again."""
        self.ended.set()
        self.ended = threading.Event()
        for worker in self._workers:
            worker.kill()
