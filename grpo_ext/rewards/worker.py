"""What runs in a process that calls reward functions (`reward_workers`), and how functions get there.

The process imports neither the training script nor torch by itself. Started by rewards.workers.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy

from .registry import FILE_MODULE_PREFIX, load_file

# a launcher's variables: a library that reads them would try to join the training processes
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS = ("ACCELERATE_", "TORCHELASTIC_")
_PR_SET_PDEATHSIG = 1


def pack(value: Any) -> bytes:
    """Pickle a value with functions in it for another interpreter: what `__main__` defines by value, the rest by name.

    Raises:
        Exception: something in it cannot be pickled.
    """
    files = {name: module.__file__ for name, module in sys.modules.items() if name.startswith(FILE_MODULE_PREFIX)}
    return pickle.dumps((sys.path, files, cloudpickle.dumps(value)))


def unpack(packed: bytes) -> Any:
    """A packed value; imports the modules that it names from where `pack` found them."""
    path, files, value = pickle.loads(packed)
    sys.path.extend(part for part in path if part not in sys.path)
    for name, file in files.items():
        if name not in sys.modules:
            load_file(file, name)
    return pickle.loads(value)


def as_list(rewards: Any) -> Any:
    """Run a generator here, so that the timeout and the retries cover it."""
    return list(rewards) if isinstance(rewards, Iterator) else rewards


class RemoteError(Exception):
    """An error of a reward function in another process, in words: its class may not unpickle in this one."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return self.text


def begin() -> None:
    """Prepare a process that has just started. On Linux it ends with its training process. Ctrl-C does not reach it."""
    for name in [n for n in os.environ if n in _LAUNCHED or n.startswith(_LAUNCHERS)]:
        del os.environ[name]
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform == "linux":  # by the kernel, so that code that holds the interpreter lock ends too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_function: Callable[[bytes], Callable[..., Any]] = functools.cache(unpack)  # loads once


def load(packed: bytes) -> None:
    """Load a function, which imports the modules that it names.

    Raises:
        RemoteError: it cannot be loaded.
    """
    try:
        _function(packed)
    except BaseException as error:  # sys.exit() of a module too
        raise RemoteError(type(error).__name__, str(error)) from error


def score(
    packed: bytes, seed: int, keywords: dict[str, Any], recorders: Sequence[str]
) -> tuple[Any, list[tuple[str, str, Any]]]:
    """What a function returns; and what it logs, as recorder, name and value, in order.

    Raises:
        RemoteError: the function raised.
    """
    logged: list[tuple[str, str, Any]] = []

    def log_metric(name: str, value: float) -> None:
        logged.append(("log_metric", name, value))

    def log_extra(column: str, values: Sequence[Any]) -> None:
        logged.append(("log_extra", column, list(values)))

    record = {"log_metric": log_metric, "log_extra": log_extra}
    try:
        function = _function(packed)
        _seed(seed)
        return as_list(function(**keywords, **{name: record[name] for name in recorders})), logged
    except BaseException as error:  # sys.exit() too: a call that failed
        raise RemoteError(type(error).__name__, str(error)) from error


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
