"""Output folders: a run never mixes its files with those of another run, and never overwrites them.

A run holds a lock on its folder while it trains, so two runs that start at once take different folders. Used by
run.keeper; the recipe refuses a folder with checkpoints before anything is loaded.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

from accelerate.logging import get_logger
from filelock import FileLock, Timeout

from ..errors import CheckpointError, ConfigError
from .checkpoint import checkpoints, remove_unfinished

logger = get_logger(__name__)
LOCK = "_running.lock"  # the Hub's uploads leave out what begins with an underscore
_PATIENCE = 10.0  # seconds; the data loader's workers of a run that was killed hold its lock until they notice


def create_output_dir(folder: str) -> None:
    """Make a run's folder, if it does not exist.

    Raises:
        ConfigError: it cannot be made, or no file can be created in it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # the lock takes a folder that is read-only for one that is taken
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder!r} cannot be written to ({error.strerror}); name a folder in which this process may "
            "create files, on a disk with space."
        ) from error


def _acquire(folder: str, patience: float = 0.0) -> FileLock | None:
    """The lock on a run's folder; None where another run holds it for longer than `patience` seconds."""
    create_output_dir(folder)
    lock = FileLock(Path(folder) / LOCK)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        return None
    remove_unfinished(folder)
    return lock


def take_folder(folder: str, in_place: bool) -> tuple[str, FileLock]:
    """Lock a run's folder; on the main process.

    Args:
        in_place: a run of the folder is resumed in it; otherwise a new run takes the folder, or, where that holds
            checkpoints or belongs to another run, the first free one of `folder-2`, `folder-3`, ...

    Returns:
        The folder, and the lock to release after the run.

    Raises:
        CheckpointError: another run holds the folder to resume in.
        ConfigError: the folder cannot be written to.
    """
    if not in_place:
        return _take_free(folder)
    if (lock := _acquire(folder, _PATIENCE)) is None:
        raise CheckpointError(
            f"{folder} belongs to another run, which has not ended, and two runs would overwrite each other's "
            "checkpoints; wait until that one has ended, end it, or name another output_dir."
        )
    return folder, lock


def _take_free(folder: str) -> tuple[str, FileLock]:
    """The first of `folder`, `folder-2`, ... without checkpoints and without another run, with its lock."""
    name, numbers, reasons = folder, itertools.count(2), list[str]()
    while (lock := None if checkpoints(name) else _acquire(name)) is None or checkpoints(name):
        held = "belongs to another run, which has not ended"
        if checkpoints(name):  # perhaps of a run that has ended in between
            held = "holds checkpoints of an earlier run, which are left alone"
        if lock is not None:
            lock.release()
        reasons.append(f"{name} {held}")
        name = f"{folder.rstrip('/')}-{next(numbers)}"
    if reasons:
        logger.warning(
            f"{'; '.join(reasons)}. This run saves to {name}. To resume an earlier run, pass "
            "resume_from_checkpoint the path of one of its checkpoints."
        )
    return name, lock
