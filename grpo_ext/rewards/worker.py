"""What runs in a process that calls reward functions (`reward_workers`), and how functions get there.

The process imports neither the training script nor torch by itself. Started by rewards.workers.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dill
import numpy

from .registry import FILE_MODULE_PREFIX, load_file

RECORDERS = ("log_metric", "log_extra")  # keywords that record what a call logs
# a launcher's: a library that reads them would try to join the training processes
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PR_SET_PDEATHSIG = 1
_LAUNCHERS = ("ACCELERATE_", "TORCHELASTIC_")


class _Pickler(dill.Pickler):
    """dill's, which opens files again where it reads them, and so would empty one that is open for writing."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, io.IOBase) and obj not in (sys.stdin, sys.stdout, sys.stderr):
            raise TypeError(f"cannot send the open file {getattr(obj, 'name', obj)!r}")
        super().save(obj, save_persistent_id)


def pack(value: Any) -> bytes:
    """A value with functions in it, for another interpreter: what `__main__` defines by value, the rest by name.

    Raises:
        Exception: something in it cannot be sent, an open file among it.
    """
    files = {name: module.__file__ for name, module in sys.modules.items() if name.startswith(FILE_MODULE_PREFIX)}
    packed = io.BytesIO()
    _Pickler(packed, recurse=True).dump(value)
    return pickle.dumps((sys.path, files, packed.getvalue()))


def unpack(packed: bytes) -> Any:
    """What was packed, with the modules that it names found where they were found there."""
    path, files, value = pickle.loads(packed)
    sys.path.extend(part for part in path if part not in sys.path)
    for name, file in files.items():
        if name not in sys.modules:
            load_file(file, name)
    return dill.loads(value)


def as_list(rewards: Any) -> Any:
    """Run a generator here, so that the timeout and the retries cover it."""
    return list(rewards) if isinstance(rewards, Iterator) else rewards


@dataclass
class Failure:
    """An error of a reward function, in words: its class may be known in the worker alone."""

    name: str
    is_type_error: bool
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The words for an error."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(type(error).__name__, isinstance(error, TypeError), str(error), trace)

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"

    def as_exception(self) -> Exception:
        """An error of that name and text."""
        base = TypeError if self.is_type_error else Exception
        error = type(self.name, (base,), {"__str__": lambda _: self.text})()
        error.__cause__ = RuntimeError(f"in a process of reward_workers:\n{self.trace}")
        return error


def begin() -> None:
    """Prepare a process that has just started; it ends with its training process, and Ctrl-C does not reach it."""
    for name in [n for n in os.environ if n in _LAUNCHED or n.startswith(_LAUNCHERS)]:
        del os.environ[name]
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform == "linux":  # by the kernel, so that code that holds the interpreter lock ends too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


@functools.cache
def _function(packed: bytes) -> Callable[..., Any]:
    return unpack(packed)


def load(packed: bytes) -> Failure | None:
    """Make a function ready; None where that worked."""
    try:
        _function(packed)
    except BaseException as error:  # of any kind: importing runs a user's code
        return Failure.of(error)
    return None


def score(
    packed: bytes, seed: int, keywords: dict[str, Any], recorders: Sequence[str]
) -> tuple[Any, list[tuple[str, str, Any]], Failure | None]:
    """What a function returns; what it logs, as recorder, name and value, in order; how it failed, or None."""
    logged: list[tuple[str, str, Any]] = []

    def log_metric(name: str, value: float) -> None:
        logged.append(("log_metric", name, value))

    def log_extra(column: str, values: Sequence[Any]) -> None:
        logged.append(("log_extra", column, list(values)))

    record = {"log_metric": log_metric, "log_extra": log_extra}
    try:
        function = _function(packed)
        _seed(seed)
        rewards = as_list(function(**keywords, **{name: record[name] for name in recorders}))
        pickle.dumps((rewards, logged))
    except BaseException as error:  # sys.exit() too: a call that failed
        return None, [], Failure.of(error)
    return rewards, logged, None


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
