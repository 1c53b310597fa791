"""Processes that call reward functions beside training (`reward_workers`), and can be killed.

loky starts, watches and kills them: fresh interpreters that do not import the training script, so a script needs no
`if __name__ == "__main__"`. Every worker is an executor of one process, so killing one call ends no other. Used by
rewards.guard; what runs in a worker is rewards.worker.
"""

from __future__ import annotations

import operator
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
_ENVIRONMENT = {**dict.fromkeys(_ONE_THREAD, "1"), **dict.fromkeys(_DEVICES, "")}


class WorkerDied(RuntimeError):
    """The process of a call ended before it answered."""

    remedy = (
        "reward_retries makes the call again, reward_on_failure='none' goes on without, and fewer reward_workers take "
        "less memory."
    )


class PackedFunction(NamedTuple):
    """A reward function for other processes; holding `function` keeps its `id`."""

    name: str
    function: Callable[..., Any]
    packed: bytes


class RewardWorker:
    """One process, used by one thread at a time; started when it is asked, and again after it has ended."""

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
        if self._executor is None:
            self._executor = ProcessPoolExecutor(1, timeout=None, env=_ENVIRONMENT, initializer=begin)
        future = None
        try:
            future = self._executor.submit(function, *arguments)
            return future.result(seconds)
        except (BrokenProcessPool, ShutdownExecutorError) as error:
            self.kill()
            exit_codes = str(error).partition("The exit codes of the workers are ")[2].partition("\n")[0]
            raise WorkerDied(f"its process has ended {exit_codes}".rstrip()) from None
        except FutureTimeout:
            if future is None or future.done():  # the function's own
                raise
            self.kill()
            raise CallTimeout(seconds, "reward_timeout") from None

    def kill(self) -> None:
        """End the process and those that it has started; from any thread."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(kill_workers=True)


class RewardWorkers:
    """The processes of one training process, each asked by a thread of its own.

    Args:
        number: of processes.
        seed: of the run.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed = number, seed
        self._functions: dict[int, PackedFunction] = {}  # by `id`
        self._workers = [RewardWorker() for _ in range(number)]
        self._idle: SimpleQueue[RewardWorker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # a worker ends with the thread that started it (rewards.worker.begin), so these live as long as this object
        self._threads = ThreadPoolExecutor(number, "reward worker")

    def take(self, function: Callable[..., Any], name: str) -> None:
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
        for one in self._functions.values():
            for error in self._threads.map(operator.methodcaller("run", load, one.packed), self._workers):
                if error is not None:
                    self.kill()
                    raise ConfigError(
                        f"reward function '{one.name}' cannot be loaded in a process of reward_workers "
                        f"({error}), a fresh interpreter without an accelerator; define it in the script or in a "
                        "module that can be imported, let it make what it needs at its first call, or set "
                        "reward_workers=0."
                    )

    def submit(self, job: Callable[[Callable[..., Any]], Any]) -> Future[Any]:
        """Do a job with the next process that is free: `job(score)`, see `_score`."""
        return self._threads.submit(self._with_worker, job)

    def _with_worker(self, job: Callable[[Callable[..., Any]], Any]) -> Any:
        worker = self._idle.get()
        try:
            return job(lambda *arguments: self._score(worker, *arguments))
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
            plain["trainer_state"] = SimpleNamespace(**vars(state))  # its class would import transformers there
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
        """End all processes, also in the middle of a call; the next call starts them again."""
        for worker in self._workers:
            worker.kill()

    def described(self, chunks: int) -> str:
        """What runs here, as text for people.

        Args:
            chunks: calls of each function for a rollout batch, on one training process.
        """
        calls = chunks * len(self._functions)
        names = ", ".join(one.name for one in self._functions.values()) or "none: only synchronous ones run there"
        text = f"{self.number} process(es) for {names}"
        if 0 < calls < self.number:
            text += f"; {calls} call(s) for a rollout batch keep no more busy, a smaller rollout_chunk_size makes more"
        return text
