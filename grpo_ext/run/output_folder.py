"""Output folders: what an earlier run saved is never mixed with, or overwritten by, another run.

A run holds a lock on its folder while it trains, so two runs that start at once do not choose the same one. Used by the
trainer; the recipe refuses a folder with checkpoints before anything is loaded.
"""

from __future__ import annotations

import itertools
import os
import secrets
import tempfile
from pathlib import Path

from accelerate.logging import get_logger
from filelock import FileLock, Timeout

from ..errors import CheckpointError, ConfigError
from .checkpoint import checkpoints, remove_unfinished
from .manifest import read_manifest

logger = get_logger(__name__)
LOCK = "_running.lock"  # the Hub's uploads leave out what begins with an underscore
_PATIENCE = 10.0  # seconds; the data loader's workers of a run that was killed hold its lock until they notice


def create_output_dir(folder: str | Path) -> None:
    """Make a run's folder.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: str | Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"output_dir={str(folder)!r} cannot be written to ({error.strerror}); name a folder in which this process may "
        "create files, on a disk with space."
    )


def _lock(folder: str | Path, patience: float = 0.0) -> FileLock | None:
    """A lock on a run's folder; None where another run holds it for longer than `patience` seconds."""
    create_output_dir(folder)
    lock = FileLock(Path(folder) / LOCK)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass  # the lock takes a folder that is read-only for one that is taken
        lock.acquire(timeout=patience)
    except Timeout:
        return None
    except OSError as error:
        raise _not_writable(folder, error) from error
    remove_unfinished(folder)
    return lock


def _holder(folder: str | Path) -> str:
    """The run that holds a folder, in words."""
    newest = next(iter(read_manifest(folder)[-1:]), None)
    if newest is None or newest.get("finished") is not None:
        return "another run that has just begun"
    return f"another run (process {newest.get('process')}, started {newest['started']})"


class HeldFolder:
    """The folder that a run writes to, which no other run takes before it is released.

    Attributes:
        writer: names this training's place to write checkpoints, see `checkpoint.writing_folder`.
    """

    def __init__(self) -> None:
        self.writer = "checkpoint"
        self._process = os.getpid()
        self._lock: FileLock | None = None

    def take(self, folder: str, in_place: bool) -> tuple[str, str]:
        """Hold a folder; on the main process.

        Args:
            in_place: a run of the folder goes on in it; otherwise a run begins, and writes beside what is there.

        Returns:
            The folder that is held, and `writer`.

        Raises:
            CheckpointError: another run holds the folder that a run is to go on in.
            ConfigError: it cannot be written to.
        """
        self.release()
        self._process = os.getpid()
        if in_place:
            self._lock = _folder_of_run(folder)
        else:
            folder, self._lock = _free_folder(folder)
        return folder, f"{os.getpid()}-{secrets.token_hex(4)}"

    def release(self) -> None:
        """Let other runs have the folder."""
        if self._lock is not None and os.getpid() == self._process:  # a forked child's release would be its parent's
            self._lock.release()
            self._lock = None


def _free_folder(folder: str) -> tuple[str, FileLock]:
    """`folder`, or the first of `folder-2`, `folder-3`, ... without checkpoints that no run holds, and its lock."""
    reasons, earlier = list[str](), False
    for name in itertools.chain([folder], (f"{folder.rstrip('/')}-{number}" for number in itertools.count(2))):
        lock = None if checkpoints(name) else _lock(name)
        if lock is not None and not checkpoints(name):
            if reasons:
                hint = "To go on with an earlier run, pass resume_from_checkpoint the path of one of its checkpoints."
                logger.warning(f"{'; '.join(reasons)}. This run saves to {name}. {hint if earlier else ''}".rstrip())
            return name, lock
        if lock is not None:
            lock.release()  # a run saved and ended in between
        if count := len(checkpoints(name)):
            earlier = True
            reasons.append(f"{name} holds {count} checkpoint(s) of an earlier run, which are left alone")
        else:
            reasons.append(f"{name} belongs to {_holder(name)}")
    raise AssertionError("numbers do not end")


def _folder_of_run(folder: str) -> FileLock:
    lock = _lock(folder, _PATIENCE)
    if lock is None:
        raise CheckpointError(
            f"{folder} belongs to {_holder(folder)}, and two runs would overwrite each other's checkpoints; wait until "
            "that one has ended, end it, or name another output_dir."
        )
    return lock
