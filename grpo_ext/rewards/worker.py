"""Code that runs in a process of `reward_workers`, and how reward functions get there.

The process does not import the training script, nor torch unless a function does. Started by rewards.workers.
"""

import ctypes
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import numpy

from ..errors import ConfigError
from ..loading import FILE_MODULE_PREFIX, load_file

# a launcher's variables; a library that reads them would try to join the training processes
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS = ("ACCELERATE_", "TORCHELASTIC_")
_PR_SET_PDEATHSIG = 1


def pack(value: Any) -> bytes:
    """Pickle a value that holds functions for another interpreter: those of `__main__` by value, the others by name."""
    pickled, modules = cloudpickle.dumps(value), sys.modules.copy()  # another thread may add to it
    names = [name for name in modules if name.startswith(FILE_MODULE_PREFIX) and name.encode() in pickled]
    files = {name: modules[name].__file__ for name in names}
    return pickle.dumps((sys.path, files, pickled))


def unpack(packed: bytes) -> Any:
    """Unpickle what `pack` returned, after importing the modules that it names from their files."""
    path, files, value = pickle.loads(packed)
    sys.path.extend(part for part in path if part not in sys.path)
    for name, file in files.items():
        if name not in sys.modules:
            load_file(file)
    return pickle.loads(value)


@dataclass
class RewardCall:
    """One call of a reward function, with what it logged by `log_metric` and `log_extra`.

    A call has the same completions for every number of processes, so its metrics and columns are the same too.
    """

    function: str  # the name
    number: int  # the place among the reward functions
    first: int  # place of the call's first completion in the rollout batch, over all processes
    rows: int  # completions of the call
    metrics: list[tuple[str, float]] = field(default_factory=list)  # names and values, in order
    # values by column; there ought to be one for each completion of the call
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; the metric is the mean over all calls that logged it."""
        self.metrics.append((str(name), float(value)))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column of the completions table, one value for each completion of the call."""
        self.columns.setdefault(str(column), []).extend(values)


Attempt = tuple[Any, RewardCall]  # what a function returned, and what it logged


def call_function(function: Callable[..., Any], keywords: dict[str, Any], record: RewardCall) -> Attempt:
    """Call a function, which logs into a copy of `record`; a generator is exhausted."""
    record = replace(record, metrics=[], columns={})
    rewards = function(**keywords, log_metric=record.log_metric, log_extra=record.log_extra)
    return list(rewards) if isinstance(rewards, Iterator) else rewards, record


class RemoteError(Exception):
    """An error of a reward function in another process, as text: its class may not unpickle in this one."""


def begin() -> None:
    """Set up a new process: Ctrl-C does not reach it, and on Linux it ends with its training process."""
    for name in [n for n in os.environ if n in _LAUNCHED or n.startswith(_LAUNCHERS)]:
        del os.environ[name]
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform == "linux":  # the kernel also ends code that holds the interpreter lock
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_loaded: dict[int, Callable[..., Any]] = {}  # the functions of this process, by their keys


def load(key: int, packed: bytes, name: str) -> None:
    try:
        _loaded[key] = unpack(packed)
    except BaseException as error:
        raise ConfigError(
            f"reward function '{name}' cannot be loaded in a process of reward_workers ({type(error).__name__}: "
            f"{error}); define it in the script or in a module that can be imported, or set reward_workers=0."
        ) from error


def call_loaded(key: int, seed: int, keywords: dict[str, Any], record: RewardCall) -> Attempt:
    function = _loaded[key]
    random.seed(seed)
    numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
    try:
        return call_function(function, keywords, record)
    except BaseException as error:  # sys.exit() too: the call failed
        raise RemoteError(f"{type(error).__name__}: {error}") from error
