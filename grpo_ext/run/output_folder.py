"""Output folders: the files of an earlier run are never mixed with, or overwritten by, those of another.

A run holds a lock on its folder while it trains, so that two runs which start at once take different folders. Used by
the trainer; the recipe refuses a folder with checkpoints before anything is loaded.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accelerate.logging import get_logger
from filelock import FileLock, Timeout

from ..errors import CheckpointError, ConfigError
from .checkpoint import checkpoints, remove_unfinished

logger = get_logger(__name__)
LOCK = "_running.lock"  # the Hub's uploads leave out what begins with an underscore
_PATIENCE = 10.0  # seconds; the data loader's workers of a run that was killed hold its lock until they notice


@contextlib.contextmanager
def _explained(folder: str | Path) -> Iterator[None]:
    """Raise an error of the file system inside as a ConfigError that names the folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"output_dir={str(folder)!r} cannot be written to ({error.strerror}); name a folder in which this process "
            "may create files, on a disk with space."
        ) from error


def create_output_dir(folder: str | Path) -> None:
    """Make a run's folder, if it does not exist.

    Raises:
        ConfigError: it cannot be made.
    """
    with _explained(folder):
        os.makedirs(folder, exist_ok=True)


def _acquire(folder: str | Path, patience: float = 0.0) -> FileLock | None:
    """The lock on a run's folder; None where another run holds it for longer than `patience` seconds."""
    create_output_dir(folder)
    lock = FileLock(Path(folder) / LOCK)
    with _explained(folder):
        with tempfile.TemporaryFile(dir=folder):
            pass  # the lock takes a folder that is read-only for one that is taken
        try:
            lock.acquire(timeout=patience)
        except Timeout:
            return None
    remove_unfinished(folder)
    return lock


class HeldFolder:
    """The folder that a run writes to; no other run takes it before it is released.

    Attributes:
        writer: a unique name for this training's temporary folder, see `checkpoint.writing_folder`.
    """

    def __init__(self) -> None:
        self.writer = "checkpoint"
        self._lock: FileLock | None = None

    def take(self, folder: str, in_place: bool) -> tuple[str, str]:
        """Lock a folder; on the main process.

        Args:
            in_place: a run of the folder is resumed in it; otherwise a new run takes the folder, or, where that holds
                checkpoints or belongs to another run, the first free one of `folder-2`, `folder-3`, ...

        Returns:
            The folder, and `writer`.

        Raises:
            CheckpointError: another run holds the folder to resume in.
            ConfigError: the folder cannot be written to.
        """
        self.release()
        self._process = os.getpid()
        if in_place:
            self._lock = _acquire(folder, _PATIENCE)
            if self._lock is None:
                raise CheckpointError(
                    f"{folder} belongs to another run, which has not ended, and two runs would overwrite each other's "
                    "checkpoints; wait until that one has ended, end it, or name another output_dir."
                )
        else:
            folder, self._lock = _take_free(folder)
        return folder, f"{os.getpid()}-{secrets.token_hex(4)}"

    def release(self) -> None:
        """Let other runs take the folder."""
        if self._lock is not None and os.getpid() == self._process:  # a forked child's release would be its parent's
            self._lock.release()
            self._lock = None


def _take_free(folder: str) -> tuple[str, FileLock]:
    """The first of `folder`, `folder-2`, ... without checkpoints and without another run, with its lock."""
    name, number, reasons = folder, 1, list[str]()
    while True:
        lock = None if checkpoints(name) else _acquire(name)
        if checkpoints(name):  # perhaps of a run that has saved and ended in between
            if lock is not None:
                lock.release()
            reasons.append(f"{name} holds checkpoints of an earlier run, which are left alone")
        elif lock is None:
            reasons.append(f"{name} belongs to another run, which has not ended")
        else:
            break
        number += 1
        name = f"{folder.rstrip('/')}-{number}"
    if reasons:
        logger.warning(
            f"{'; '.join(reasons)}. This run saves to {name}. To resume an earlier run, pass "
            "resume_from_checkpoint the path of one of its checkpoints."
        )
    return name, lock
