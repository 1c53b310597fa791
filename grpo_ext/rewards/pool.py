"""Processes that call reward functions beside training (`reward_workers`), and can be killed.

Differs from multiprocessing and pools on it (pebble): a worker is a fresh interpreter that never imports the training
script, its threads and devices are set before it starts, and one that dies at any moment, also with exit status 0 or
while it is idle, costs one call and is replaced. Called by rewards.guard; what runs in a worker is rewards.worker.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

from ..errors import ConfigError
from .calls import RewardCall
from .guard import CallTimeout
from .worker import RECORDERS, pack

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
# a launcher's: a library that reads them would try to join the training processes
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS = ("ACCELERATE_", "TORCHELASTIC_")
_LONGEST_S = 2e6  # a wait takes no more milliseconds than a C integer holds


class WorkerDied(RuntimeError):
    """The process of a call ended before it answered."""

    remedy = (
        "reward_retries makes the call again, reward_on_failure='none' goes on without, and fewer reward_workers take "
        "less memory."
    )


class WorkerTerminated(WorkerDied):
    """It was ended by SIGTERM."""


@dataclass(frozen=True)
class PackedFunction:
    """A reward function for other processes; `function` itself is held so that its `id` stays its own."""

    name: str
    function: Callable[..., Any]
    packed: bytes


class WorkerProcess:
    """One process, used by one thread at a time; started when it is first asked, and again after it has died.

    Args:
        functions: that it may be asked for, by `id`.
        seed: of the run.
    """

    def __init__(self, functions: Mapping[int, PackedFunction], seed: int) -> None:
        self._functions, self._seed = functions, seed
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._loaded: set[int] = set()
        self._closed = False

    def load(self, keys: Iterable[int]) -> None:
        """Load functions that it does not have.

        Raises:
            ConfigError: a function cannot be loaded there.
        """
        if self._process is None or self._connection.poll(0):  # nothing was asked: it has died
            self._start()
        for key in set(keys) - self._loaded:
            one = self._functions[key]
            try:
                self._ask("load", (key, one.packed), None)
            except Exception as error:
                raise ConfigError(
                    f"reward function '{one.name}' cannot be loaded in a process of reward_workers "
                    f"({type(error).__name__}: {error}), a fresh interpreter without an accelerator; define it in the "
                    "script or in a module that can be imported, let it make what it needs at its first call, or set "
                    "reward_workers=0."
                ) from error
            self._loaded.add(key)

    def score(self, function: Any, call: RewardCall, keywords: dict[str, Any], seconds: float | None) -> Any:
        """What a function returns for a chunk; what it logs goes to the recorders in `keywords`.

        Args:
            seconds: that it may take; None: any time.

        Raises:
            CallTimeout: it took longer; the process is killed.
            WorkerDied: the process ended.
            Exception: what the function raised, by name and in words.
        """
        self.load([id(function)])
        recorders = {name: keywords[name] for name in RECORDERS if callable(keywords.get(name))}
        plain = {name: value for name, value in keywords.items() if name not in recorders}
        state = plain.get("trainer_state")
        if (step := getattr(state, "global_step", None)) is not None:
            plain["trainer_state"] = SimpleNamespace(**vars(state))  # its class would import transformers there
        # random numbers of a call do not depend on the worker, the split or an attempt that failed
        seed = zlib.crc32(f"{self._seed} {step} {call.number} {call.first}".encode())
        request = (id(function), seed, plain, list(recorders))
        try:
            rewards, logged = self._ask("score", request, seconds)
        except WorkerTerminated:  # a cluster tells all processes that the run is to end, and this one decides when
            self.load([id(function)])
            rewards, logged = self._ask("score", request, seconds)
        for recorder, name, value in logged:
            recorders[recorder](name, value)
        return rewards

    def _ask(self, name: str, arguments: Any, seconds: float | None) -> Any:
        request = pickle.dumps((name, arguments))
        try:
            self._connection.send_bytes(request)
            answered = self._connection.poll(None if seconds is None else min(seconds, _LONGEST_S))
            answer = self._connection.recv_bytes() if answered else None
        except (EOFError, OSError):
            raise self._ended() from None
        if answer is None:
            self.kill()
            raise CallTimeout(seconds, "reward_timeout")
        worked, result = pickle.loads(answer)
        if not worked:
            raise _in_words(*result)
        return result

    def _start(self) -> None:
        if self._closed:
            raise WorkerDied("its process was ended with the trainer")
        self.kill()
        self._connection, there = Pipe()
        path = [*map(str, sys.path)]
        main = f"from grpo_ext.rewards.worker import main; main({there.fileno()})"
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {main}"],
                stdin=subprocess.PIPE,  # closes with this process, which ends the worker
                pass_fds=[there.fileno()],
                env=_environment(),
                start_new_session=True,  # a group of its own, killed as a whole; Ctrl-C does not reach it
            )

    def _ended(self) -> WorkerDied:
        """How the process ended, as an error."""
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        self.kill()
        if (status := process.returncode) >= 0:
            return WorkerDied(f"its process ended with status {status}")
        why = ", as the system does where memory ends" if status == -signal.SIGKILL else ""
        kind = WorkerTerminated if status == -signal.SIGTERM else WorkerDied
        return kind(f"its process was ended by {signal.Signals(-status).name}{why}")

    def kill(self) -> None:
        """End the process, and those that it has started."""
        process, self._process = self._process, None
        self._loaded.clear()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()  # type: ignore[union-attr]
        self._connection.close()

    def close(self) -> None:
        """End the process for good, from any thread; a call that it runs fails."""
        self._closed = True
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """One thread, no accelerator, and no part in the run of the training processes."""
    kept = {n: v for n, v in os.environ.items() if n not in _LAUNCHED and not n.startswith(_LAUNCHERS)}
    return {**kept, **dict.fromkeys(_ONE_THREAD, "1"), **dict.fromkeys(_DEVICES, "")}


def _in_words(name: str, is_type_error: bool, text: str, trace: str) -> Exception:
    """An error of a worker: its class may exist there alone, so it has its name and its text."""
    base = TypeError if is_type_error else Exception
    error = type(name, (base,), {"__str__": lambda self: text})()
    error.__cause__ = RuntimeError(f"in a process of reward_workers:\n{trace}")
    return error


class RewardWorkers:
    """Processes that call reward functions, each driven by a thread; they end with this object or with the program.

    Args:
        number: of processes, for each training process.
        seed: of the run.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self._functions: dict[int, PackedFunction] = {}
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._processes = [WorkerProcess(self._functions, seed) for _ in range(number)]
        for process in self._processes:  # daemons, so that a call that hangs does not keep the program from ending
            threading.Thread(target=_serve, args=(self._jobs, process), daemon=True, name="reward worker").start()
        self.close = weakref.finalize(self, _end, self._jobs, self._processes)

    def take(self, function: Callable[..., Any], name: str) -> None:
        """Be ready to call a function.

        Raises:
            ConfigError: it cannot be sent to another process.
        """
        if id(function) in self._functions:
            return
        try:
            packed = pack(function)
        except Exception as error:
            raise ConfigError(
                f"reward function '{name}' cannot be sent to the processes of reward_workers={self.number} "
                f"({type(error).__name__}: {error}); let it open files and connections and make clients and locks at "
                "its first call, or set reward_workers=0."
            ) from error
        self._functions[id(function)] = PackedFunction(name, function, packed)

    def start(self) -> None:
        """Start the processes with the functions that were taken, all at once; before any job.

        Raises:
            ConfigError: a function cannot be loaded there.
        """
        keys = list(self._functions)
        try:
            with ThreadPoolExecutor(self.number) as threads:
                list(threads.map(lambda process: process.load(keys), self._processes))
        except BaseException:
            self.close()
            raise

    def described(self, chunks: int) -> str:
        """What runs here, as text for people.

        Args:
            chunks: calls of each function for a rollout batch, on one training process.
        """
        names, calls = [one.name for one in self._functions.values()], chunks * len(self._functions)
        text = f"{self.number} process(es) for {', '.join(names) or 'nothing: only synchronous functions run there'}"
        if 0 < calls < self.number:
            text += f"; {calls} call(s) for a rollout batch keep no more busy, a smaller rollout_chunk_size makes more"
        return text

    def submit(self, job: Callable[[WorkerProcess], Any]) -> Future[Any]:
        """Do a job with the next process that is free."""
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future


def _serve(jobs: queue.SimpleQueue[Any], process: WorkerProcess) -> None:
    while (item := jobs.get()) is not None:
        future, job = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job(process))
            except BaseException as error:  # of any kind; raised where the result is asked for
                future.set_exception(error)
        del item, future, job
    process.kill()


def _end(jobs: queue.SimpleQueue[Any], processes: list[WorkerProcess]) -> None:
    for process in processes:
        process.close()
        jobs.put(None)
