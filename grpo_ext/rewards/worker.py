"""What runs in a process that calls reward functions (`reward_workers`), and how functions get there.

A fresh interpreter that imports neither the training script nor torch by itself, so that scripts need no
`if __name__ == "__main__"`. It answers one request after the other and ends with the process that started it
(rewards.pool).
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import dill

from .registry import FILE_MODULE_PREFIX, load_file

RECORDERS = ("log_metric", "log_extra")  # keywords that record what a call logs


def pack(value: Any) -> bytes:
    """A value with functions in it, for another interpreter: what `__main__` defines by value, the rest by name."""
    files = {name: module.__file__ for name, module in sys.modules.items() if name.startswith(FILE_MODULE_PREFIX)}
    return pickle.dumps((sys.path, files, dill.dumps(value, recurse=True)))


def unpack(packed: bytes) -> Any:
    """What was packed, with the modules that it names found where they were found there."""
    path, files, value = pickle.loads(packed)
    sys.path.extend(part for part in path if part not in sys.path)
    for name, file in files.items():
        if name not in sys.modules:
            load_file(file, name)
    return dill.loads(value)


def listed(rewards: Any) -> Any:
    """Generators run where they can be timed and tried again."""
    return list(rewards) if isinstance(rewards, Iterator) else rewards


def main(channel: int) -> None:
    """Answer requests, pairs of a name and arguments, until there are no more.

    Args:
        channel: descriptor of the connection; standard input is a pipe that closes with the training process.
    """
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _end_with(lifeline)
    os.set_inheritable(channel, False)
    connection = Connection(channel)
    os.register_at_fork(after_in_child=connection.close)  # or the end of this process would not be noticed
    functions: dict[int, Callable[..., Any]] = {}
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(functions, request))


def _end_with(lifeline: int) -> None:
    """Kill this process and those it has started once the other end of a pipe is closed, whatever runs here."""
    import fcntl  # not there on Windows, where this module is imported too

    if hasattr(fcntl, "F_SETSIG"):  # Linux: by the kernel, so that code that holds the interpreter lock ends too
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        return

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _answer(functions: dict[int, Callable[..., Any]], request: bytes) -> bytes:
    """Whether the request worked, and its result or its error in words, which can be read anywhere."""
    try:
        name, arguments = pickle.loads(request)
        result = None
        if name == "load":
            key, packed = arguments
            functions[key] = unpack(packed)
        else:
            key, seed, keywords, recorders = arguments
            result = _score(functions[key], seed, keywords, recorders)
        _refuse_accelerator()
        return pickle.dumps((True, result))
    except BaseException as error:  # sys.exit() too: a call that failed
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return pickle.dumps((False, (type(error).__name__, isinstance(error, TypeError), str(error), trace)))


def _score(
    function: Callable[..., Any], seed: int, keywords: dict[str, Any], recorders: Sequence[str]
) -> tuple[Any, list[tuple[str, str, Any]]]:
    """What a function returns, and what it logs: recorder, name and value, in order."""
    logged: list[tuple[str, str, Any]] = []

    def log_metric(name: str, value: float) -> None:
        logged.append(("log_metric", name, value))

    def log_extra(column: str, values: Sequence[Any]) -> None:
        logged.append(("log_extra", column, list(values)))

    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
    record = {"log_metric": log_metric, "log_extra": log_extra}
    return listed(function(**keywords, **{name: record[name] for name in recorders})), logged


def _refuse_accelerator() -> None:
    """An accelerator belongs to training alone: its context takes memory there for every process that has one."""
    torch: Any = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        if torch is not None and getattr(torch, kind).is_initialized():
            raise RuntimeError(
                f"the function has initialised {kind} in a process of reward_workers, which has no accelerator; "
                "compute on the CPU, or set reward_workers=0"
            )
