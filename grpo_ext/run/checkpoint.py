"""Folders of runs, and of checkpoints, which are complete or absent: written under another name, synced, then renamed.

Differs from transformers, which writes into the final folder file by file. `checkpoint.json` lists every file with its
size and SHA-256; it is written last and verified before anything is loaded. A run locks its folder while it trains, and
never mixes its files with those of another run. Used by run.keeper, `grpo-ext` and the recipe.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from filelock import FileLock, Timeout
from huggingface_hub.utils.sha import sha_fileobj
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import CheckpointError, ConfigError

logger = get_logger(__name__)
LISTING = "checkpoint.json"
LOCK = "_running.lock"  # the Hub's uploads leave out what begins with an underscore
RECORD = "_run.json"  # the name of the output_dir that a run's folder was given for, and when it last started
_PATIENCE = 10.0  # seconds; the data loader's workers of a run that was killed hold its lock until they notice
_STEP = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
_PARTIAL = "_writing-"  # begins the names of folders that are not complete


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return sha_fileobj(file).hex()


def _hashes(paths: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor() as threads:
        return list(threads.map(file_hash, paths))


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in a run's folder, complete or not, oldest step first."""
    root = Path(folder)
    if not root.is_dir():
        return []
    steps = {path: int(match[1]) for path in root.iterdir() if (match := _STEP.match(path.name)) and path.is_dir()}
    return sorted(steps, key=steps.__getitem__)


def write_listing(folder: Path, about: dict[str, Any]) -> None:
    """List every file of a finished checkpoint, and sync all of it to the disk."""
    paths = sorted(folder.rglob("*"))
    listed = [path for path in paths if path.is_file() and path.name != LISTING]
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(listed, _hashes(listed), strict=True)
    }
    content, listing = {**about, "files": files}, folder / LISTING
    listing.write_text(json.dumps({**content, "sha256": _content_hash(content)}, indent=1) + "\n")
    for path in (*paths, listing, folder):
        _sync(path)


def _content_hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def read_listing(folder: Path) -> dict[str, Any] | None:
    """None for a checkpoint of another trainer; a CheckpointError for a broken listing."""
    path = folder / LISTING
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content.pop("sha256") == _content_hash(content):
            return content
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        pass
    raise CheckpointError(f"{path} is broken: it is not the listing that was written.")


@contextmanager
def explaining_format(checkpoint: str | Path) -> Iterator[None]:
    """A name that is missing in what a checkpoint holds is a CheckpointError."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(
            f"{checkpoint} has no entry {error}, because another version of grpo_ext wrote it; resume it with that "
            f"version, or begin a new run with its weights (grpo-ext export {checkpoint} NEW_FOLDER)."
        ) from error


def why_broken(folder: str | Path) -> str | None:
    """Why a checkpoint must not be loaded, as a sentence; that of another trainer has only to be finished."""
    root = Path(folder)
    if not root.is_dir():
        return f"{root} {'is not a folder' if root.exists() else 'does not exist'}"
    if inside := checkpoints(root):
        return f"{root} is a run, not a checkpoint; the newest in it is {inside[-1]}"
    try:
        listing = read_listing(root)
    except CheckpointError as error:
        return str(error).rstrip(".")
    if listing is None:
        if any(root.glob("grpo_ext_*")):  # written by this package
            return f"{root} has lost its {LISTING}"
        written = (root / TRAINER_STATE_NAME).is_file()  # transformers writes it last
        return None if written else f"{root} has neither {LISTING} nor {TRAINER_STATE_NAME}"
    files = {root / name: expected for name, expected in listing["files"].items()}
    for path, expected in files.items():
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != expected["size"]:
            return f"{path} has {size} bytes instead of {expected['size']}"
    for path, digest in zip(files, _hashes([*files]), strict=True):
        if digest != files[path]["sha256"]:
            return f"{path} has changed since it was written (SHA-256 differs)"
    return None


def why_not_resumable(folder: str | Path) -> str | None:
    """Why a run cannot resume from a checkpoint: it is broken, or holds no state of the optimizer or the schedule."""
    root = Path(folder)
    if (reason := why_broken(root)) is not None or any(root.glob("global_step*")):
        return reason
    files = {"optimizer state": "*optimizer*", "learning-rate schedule": "scheduler.pt"}
    missing = [what for what, pattern in files.items() if not any(root.glob(pattern))]
    if not missing:
        return None
    return (
        f"{root} holds no {' and no '.join(missing)} (save_only_model=True writes none), which a resumed run would "
        f"begin anew; a new run can begin with its weights, model={str(root)!r}"
    )


def is_path(wanted: str | bool | None) -> bool:
    """Whether `resume_from_checkpoint` is a path, not "latest" or "auto"."""
    return wanted not in (None, False, True, "latest", "auto")


def find_checkpoint(wanted: str | bool | None, folder: str) -> str | None:
    """The verified checkpoint to resume from; None for a new run."""
    existing = checkpoints(folder)
    if not wanted or (wanted == "auto" and not existing):
        return None
    reasons: list[str] = []
    for path in [Path(str(wanted))] if is_path(wanted) else reversed(existing):
        if (reason := why_not_resumable(path)) is None:
            for sentence in reasons:
                logger.warning(f"Skipped a checkpoint: {sentence}.")
            return str(path)
        reasons.append(reason)
    searched = "" if is_path(wanted) else f"{folder} holds no complete checkpoint: "
    raise CheckpointError(
        f"{searched}{'; '.join(reasons) or 'no run has saved one'}, so nothing can be resumed from it; use "
        "resume_from_checkpoint='latest' for the newest complete checkpoint of output_dir, 'auto' for that or a "
        "new run where there is none, or leave it out to start a new run."
    )


def writing_folder(run: str | Path, owner: str = "checkpoint") -> Path:
    """Where `owner` writes a checkpoint before it is renamed: on the same file system."""
    return Path(run) / f"{_PARTIAL}{owner}"


def publish(written: Path, final: Path) -> Path | None:
    """Rename a finished checkpoint to its final name; returns the new name of a folder that had it already."""
    replaced = _rename_aside(final) if final.exists() else None
    os.rename(written, final)
    _sync(final.parent)
    return replaced


def _rename_aside(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}.replaced-{number}") for number in itertools.count(1))
    return folder.rename(next(name for name in names if not name.exists()))


def set_aside_later(checkpoint: str | Path) -> list[Path]:
    """Rename the checkpoints after the one that a run resumes from, so that "latest" is not one; their new names."""
    path = Path(checkpoint).resolve()
    siblings = checkpoints(path.parent)
    return [_rename_aside(later) for later in siblings[siblings.index(path) + 1 :]] if path in siblings else []


def rotate(run: str | Path, limit: int | None, *protected: str | Path | None) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`, and, unlike transformers, none that was renamed."""
    if limit is None or limit <= 0:
        return
    existing, keep = checkpoints(run), {Path(path).resolve() for path in protected if path is not None}
    deletable = [path for path in existing if path.resolve() not in keep]
    for path in deletable[: max(0, len(existing) - limit)]:
        # renamed first: a half-deleted folder is not a checkpoint
        os.rename(path, doomed := writing_folder(run, f"{path.name}-removed"))
        shutil.rmtree(doomed, ignore_errors=True)


# ---- The folder of a run --------------------------------------------------------------------------------------------


def create_output_dir(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # the lock takes a folder that is read-only for one that is taken
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder!r} cannot be written to ({error.strerror}); use a writable folder on a disk with room."
        ) from error


def _record(folder: Path) -> dict[str, str]:
    """What is recorded of a run's folder; its own name, never started, where nothing is, or of a copy."""
    name = os.path.basename(folder)
    with suppress(OSError, ValueError, TypeError, KeyError):
        record = json.loads((folder / RECORD).read_text())
        if record["folder"] == name:
            return {key: str(record[key]) for key in ("output_dir", "started")}
    return {"output_dir": name, "started": ""}


def record_start(folder: str | Path, output_dir: str | Path) -> None:
    """Record that a run starts in a folder, which it was given for `output_dir`."""
    path = Path(folder)
    asked = _record(path)["output_dir"] if (path / RECORD).exists() else os.path.basename(Path(output_dir))
    with suppress(OSError):  # without it, a resume from here goes on in output_dir
        started = datetime.now(UTC).isoformat(timespec="microseconds")
        record = {"folder": os.path.basename(path), "output_dir": asked, "started": started}
        (path / RECORD).write_text(json.dumps(record) + "\n")


def runs_of(output_dir: str | Path) -> list[Path]:
    """The folders of runs with this `output_dir`: itself, `-2`, `-3`; the last started at the end."""
    base, name = Path(output_dir), os.path.basename(Path(output_dir))
    numbered = (path for path in base.parent.glob("*") if re.fullmatch(rf"{re.escape(name)}-\d+", path.name))
    beside = [path for path in numbered if _record(path)["output_dir"] == name]
    return sorted([base, *beside], key=lambda path: _record(path)["started"])


def run_to_resume(wanted: str | bool | None, output_dir: str) -> Path | None:
    """The folder of `output_dir` in which a resumed run continues; None for a new run, or one that is elsewhere."""
    if not wanted:
        return None
    runs = [run for run in runs_of(output_dir) if checkpoints(run)]
    if is_path(wanted):
        source = Path(str(wanted)).resolve().parent
        runs = [run for run in runs if run.resolve() == source]
    return runs[-1] if runs else None


def _acquire(folder: str, patience: float = 0.0) -> FileLock | None:
    """The lock on a run's folder; None where another run holds it for longer than `patience` seconds."""
    create_output_dir(folder)
    lock = FileLock(Path(folder) / LOCK, thread_local=False)  # a thread may take it (`from_main_process`)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        return None
    for partial in Path(folder).glob(f"{_PARTIAL}*"):  # by interrupted saves
        shutil.rmtree(partial, ignore_errors=True)
    return lock


def take_folder(folder: str, in_place: bool) -> tuple[str, FileLock]:
    """Lock the folder of a run that resumes, or the first free one of `folder`, `folder-2`, ... for a new run."""
    if in_place:
        if (lock := _acquire(folder, _PATIENCE)) is not None:
            return folder, lock
        raise CheckpointError(
            f"{folder} belongs to another run, which has not ended, and two runs would overwrite each other's "
            "checkpoints; wait until that one has ended, end it, or name another output_dir."
        )
    name, numbers, reasons = folder, itertools.count(2), list[str]()
    while (lock := None if checkpoints(name) else _acquire(name)) is None or checkpoints(name):
        reason = "belongs to another run, which has not ended"
        if checkpoints(name):  # perhaps of a run that has ended in between
            reason = "holds checkpoints of an earlier run, which are left alone"
        if lock is not None:
            lock.release()
        reasons.append(f"{name} {reason}")
        name = f"{folder.rstrip('/')}-{next(numbers)}"
    if reasons:
        logger.warning(
            f"{'; '.join(reasons)}. This run saves to {name}. To resume an earlier run, pass "
            "resume_from_checkpoint the path of one of its checkpoints."
        )
    return name, lock
