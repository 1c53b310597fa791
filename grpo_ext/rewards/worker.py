"""What runs in a process of `reward_workers`, and how reward functions get there.

The process imports neither the training script nor, by itself, torch. rewards.workers starts it.
"""

from __future__ import annotations

import contextlib
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
    """Pickle a value that holds functions for another interpreter: those of `__main__` by value, the others by name.

    Raises:
        Exception: something in it cannot be pickled.
    """
    pickled = cloudpickle.dumps(value)
    loaded = {name: module.__file__ for name, module in sys.modules.items() if name.startswith(FILE_MODULE_PREFIX)}
    files = {name: file for name, file in loaded.items() if name.encode() in pickled}
    return pickle.dumps((sys.path, files, pickled))


def unpack(packed: bytes) -> Any:
    """Unpickle what `pack` returned; imports the modules that it names from where `pack` found them."""
    path, files, value = pickle.loads(packed)
    sys.path.extend(part for part in path if part not in sys.path)
    for name, file in files.items():
        if name not in sys.modules:
            load_file(file)
    return pickle.loads(value)


def as_list(rewards: Any) -> Any:
    """Exhaust a generator, so that the timeout and the retries cover it."""
    return list(rewards) if isinstance(rewards, Iterator) else rewards


class RemoteError(Exception):
    """An error of a reward function in another process, as text: its class may not unpickle in this one."""


def begin() -> None:
    """Prepare a new process: Ctrl-C does not reach it, and on Linux it ends with its training process."""
    for name in [n for n in os.environ if n in _LAUNCHED or n.startswith(_LAUNCHERS)]:
        del os.environ[name]
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform == "linux":  # by the kernel, so that code that holds the interpreter lock ends too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_unpacked: Callable[[bytes], Callable[..., Any]] = functools.cache(unpack)  # loads once


def load(packed: bytes) -> None:
    """Load a function, which imports the modules that it names.

    Raises:
        RemoteError: it cannot be loaded.
    """
    with _as_remote_error():
        _unpacked(packed)


def call(packed: bytes, seed: int, keywords: dict[str, Any]) -> tuple[Any, list[tuple[str, str, Any]]]:
    """What a function returns; and what it logs, as recorder, name and value, in order.

    Raises:
        RemoteError: the function raised.
    """
    logged: list[tuple[str, str, Any]] = []

    def log_metric(name: str, value: float) -> None:
        logged.append(("log_metric", name, value))

    def log_extra(column: str, values: Sequence[Any]) -> None:
        logged.append(("log_extra", column, list(values)))

    with _as_remote_error():
        function = _unpacked(packed)
        _seed(seed)
        return as_list(function(**keywords, log_metric=log_metric, log_extra=log_extra)), logged


@contextlib.contextmanager
def _as_remote_error() -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # sys.exit() too: the call failed
        raise RemoteError(f"{type(error).__name__}: {error}") from error


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
