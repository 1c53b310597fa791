"""Processes that call reward functions beside training (`reward_workers`) and can be killed.

loky starts, watches and kills them: fresh interpreters that do not import the training script, so a script needs no
`if __name__ == "__main__"`. Each process has its own executor, so killing one call ends no other.
"""

import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from types import SimpleNamespace
from typing import Any

import tenacity
from loky import ProcessPoolExecutor
from loky.process_executor import BrokenProcessPool, ShutdownExecutorError

from ..errors import ConfigError
from .guard import CallCancelled, CallTimeout, ChunkRewards, GuardedCall
from .worker import Attempt, begin, call_loaded, load, pack

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
        "reward_retries repeats the call, reward_on_failure='none' continues without its rewards, and fewer "
        "reward_workers need less memory."
    )


class RewardWorkers:
    """The reward processes of one training process: each thread of a pool starts one at its first call."""

    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed = number, seed
        self._ended = threading.Event()  # set by `kill` for current calls; later ones have another
        # by `id`, which is not reused while the function is alive
        self._packed: dict[int, tuple[Callable[..., Any], bytes]] = {}
        # by thread: a process, and the keys of the functions that it has loaded
        self._processes: dict[int, tuple[ProcessPoolExecutor, set[int]]] = {}
        # a process ends with the thread that started it (rewards.worker.begin), so threads live as long as this object
        self._threads = ThreadPoolExecutor(number, "reward worker")

    def add(self, function: Callable[..., Any], name: str) -> None:
        if id(function) in self._packed:
            return
        try:
            self._packed[id(function)] = function, pack(function)
        except Exception as error:
            raise ConfigError(
                f"reward function '{name}' cannot be sent to the processes of reward_workers={self.number} "
                f"({type(error).__name__}: {error}); let it open files and connections and create clients and locks "
                "at its first call, or set reward_workers=0."
            ) from error

    def submit(self, guarded: GuardedCall) -> Future[ChunkRewards]:
        self.add(guarded.function, guarded.record.function)
        ended = self._ended
        return self._threads.submit(
            guarded.run, partial(self._attempt, guarded, ended), tenacity.sleep_using_event(ended)
        )

    def _attempt(self, guarded: GuardedCall, ended: threading.Event) -> Attempt:
        keywords, state = dict(guarded.keywords), guarded.keywords["trainer_state"]
        if (step := getattr(state, "global_step", None)) is not None:
            # its class would import transformers there, and its log grows during a run
            keywords["trainer_state"] = SimpleNamespace(**{**vars(state), "log_history": []})
        # random numbers of a call do not depend on the process, the split or failed attempts
        seed = zlib.crc32(f"{self.seed} {step} {guarded.record.number} {guarded.record.first}".encode())
        for again in (True, False):
            if ended.is_set():
                break
            try:
                return self._call(guarded, seed, keywords)
            except WorkerDied as died:
                # a cluster sends SIGTERM to all processes, and the training process decides when to stop
                if not ended.is_set() and not (again and "SIGTERM" in str(died)):
                    raise
        raise CallCancelled("the processes of reward_workers were ended")

    def _call(self, guarded: GuardedCall, seed: int, keywords: dict[str, Any]) -> Attempt:
        """Run `call_loaded` in this thread's process; kill it after the time that a call may take."""
        thread, key, record = threading.get_ident(), id(guarded.function), guarded.record
        process = self._processes.get(thread)
        if process is None:
            process = ProcessPoolExecutor(1, timeout=None, env=_ENVIRONMENT, initializer=begin), set()
            self._processes[thread] = process
        executor, loaded = process
        try:
            if key not in loaded:
                executor.submit(load, key, self._packed[key][1], record.function).result()
                loaded.add(key)
            return executor.submit(call_loaded, key, seed, keywords, record).result(guarded.faults.timeout)
        except (BrokenProcessPool, ShutdownExecutorError) as error:
            self._kill(thread)
            exit_codes = str(error).partition("The exit codes of the workers are ")[2].partition("\n")[0]
            raise WorkerDied(f"its process has ended: {exit_codes.strip('{}') or 'no exit code'}") from None
        except FutureTimeout:
            self._kill(thread)
            raise CallTimeout(guarded.faults.timeout, "reward_timeout") from None

    def _kill(self, thread: int) -> None:
        executor, _ = self._processes.pop(thread, (None, None))
        if executor is not None:
            executor.shutdown(kill_workers=True)

    def kill(self) -> None:
        """End all processes and submitted calls; the next call starts processes again."""
        self._ended.set()
        self._ended = threading.Event()
        for thread in list(self._processes):
            self._kill(thread)
