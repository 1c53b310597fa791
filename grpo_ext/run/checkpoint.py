"""Folders of runs, and of checkpoints, which are complete or absent: written under another name, synced, then renamed.

Differs from transformers, which writes into the final folder file by file. `checkpoint.json` lists every file with its
size and hash; it is written last and verified before anything is loaded. A run locks its folder while it trains, and
never mixes its files with those of another run. Used by run.keeper, `grpo-ext` and the recipe.
"""

import filecmp
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import CheckpointError, ConfigError
from ..runtime.messages import logger
from .record import STEPS

LISTING = "checkpoint.json"
FINGERPRINT = "grpo_ext_identity.json"  # in a checkpoint: what its run is (run.fingerprint)
LOCK = "_running.lock"  # the Hub's uploads leave out what begins with an underscore
_MARK = "_run.json"
_PATIENCE = 10.0  # seconds; the data loader's workers of a run that was killed hold its lock until they notice
_PARTIAL = "_writing-"  # begins the names of folders that are not complete
_HASH = "xxh3_128"


def file_hash(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _hashes(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor() as threads:
        return [*threads.map(file_hash, paths)]


def _numbered(folder: Path, name: str) -> dict[int, Path]:
    """The folders `name-N` in a folder, by their numbers, in order."""
    matches = {path: re.fullmatch(rf"{re.escape(name)}-(\d+)", path.name) for path in folder.glob("*")}
    return dict(sorted((int(match[1]), path) for path, match in matches.items() if match and path.is_dir()))


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in a run's folder, complete or not, oldest step first."""
    return [*_numbered(Path(folder), PREFIX_CHECKPOINT_DIR).values()]


def write_listing(folder: Path, about: dict[str, Any]) -> None:
    """Sync a finished checkpoint to the disk, and list every file of it; hashing is hidden behind the sync."""
    paths = [path for path in folder.rglob("*") if path.name != LISTING]
    listed = sorted(path for path in paths if path.is_file())
    with ThreadPoolExecutor() as threads:
        synced = threads.map(_sync, paths)
        hashes = _hashes(listed)
        list(synced)  # its errors are raised
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, _HASH: digest}
        for path, digest in zip(listed, hashes, strict=True)
    }
    content, listing = {**about, "files": files}, folder / LISTING
    listing.write_text(json.dumps({**content, "sha256": _content_hash(content)}, indent=1) + "\n")
    for path in (listing, folder):
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
    if (root / STEPS).is_file():
        return (
            f"{root} is a run that saved no checkpoint (train with --save_strategy steps --save_steps N); if it saved "
            "its model at the end, the folder itself holds that"
        )
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
    for path, digest in zip(files, _hashes(files), strict=True):
        if digest != files[path].get(_HASH):
            return f"{path} has changed since it was written, or another version wrote it (its {_HASH} hash differs)"
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


def find_checkpoint(wanted: str | bool | None, folder: str | Path) -> str | None:
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
    searched, remedy = f"{folder} holds no complete checkpoint: ", "name one of another run by its path"
    if is_path(wanted):
        searched, remedy = "", "use 'latest' for the newest complete one of output_dir, 'auto' for that or a new run"
    raise CheckpointError(
        f"{searched}{'; '.join(reasons) or 'no run has saved one'}, so nothing can be resumed from it; as "
        f"resume_from_checkpoint {remedy}, or leave it out to start a new run."
    )


def writing_folder(run: str | Path, owner: str) -> Path:
    """Where `owner` writes a checkpoint before it is renamed: on the same file system."""
    return Path(run) / f"{_PARTIAL}{owner}"


def publish(written: Path, final: Path) -> None:
    """Rename a finished checkpoint to its final name."""
    os.rename(written, final)
    _sync(final.parent)


def link(checkpoint: Path, copy: Path) -> None:
    """Make a checkpoint's copy of hard links, which the deletion of either does not harm; or of its files."""

    def link_file(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # a file system without links
            shutil.copy2(source, target)

    written = writing_folder(copy.parent, copy.name)
    shutil.copytree(checkpoint, written, copy_function=link_file)
    publish(written, copy)


def take_along(checkpoint: Path, run: Path, state: TrainerState) -> None:
    """Let a run resumed from an earlier checkpoint begin with that one, and the best one until then.

    A kill between the two leaves the former, so the next start takes the best one from the folder that its state names.
    """
    if not _is_beside(run):
        return
    best = checkpoint.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
    elsewhere = Path(state.best_model_checkpoint or best)
    with suppress(OSError):  # it is gone; by now another run may have a checkpoint there
        if not best.is_dir() and filecmp.cmp(elsewhere / FINGERPRINT, checkpoint / FINGERPRINT, shallow=False):
            best = elsewhere
    for source, step in ((checkpoint, state.global_step), (best, state.best_global_step)):
        copy = run / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        if not copy.exists() and why_broken(source) is None:
            link(source, copy)


def rotate(run: str | Path, limit: int | None, *protected: str | Path | None) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`."""
    if limit is None or limit <= 0:
        return
    existing, keep = checkpoints(run), {Path(path).resolve() for path in protected if path is not None}
    deletable = [path for path in existing if path.resolve() not in keep]
    for path in deletable[: max(0, len(existing) - limit)]:
        # renamed first: a half-deleted folder is not a checkpoint
        try:
            os.rename(path, doomed := writing_folder(run, f"{path.name}-removed"))
        except OSError as error:
            logger.warning(f"{path} could not be deleted ({error.strerror}).")
        else:
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


def _is_beside(folder: Path) -> bool:
    """Whether a folder was made beside an output_dir, and not by a user, or as a copy."""
    with suppress(OSError, ValueError, AttributeError):
        return folder.name == json.loads((folder / _MARK).read_text()).get("folder")
    return False


def _base_of(folder: Path) -> Path:
    """The output_dir beside which a folder was made for a run; of any other folder, itself."""
    path = _named(folder)
    return path.with_name(path.name.rpartition("-")[0] or path.name) if _is_beside(path) else path


def _named(folder: str | Path) -> Path:
    """A folder by a path that ends in its name, which "." does not."""
    path = Path(folder)
    return path if path.name.strip(".") else Path(os.path.abspath(path))


def _beside(base: Path) -> dict[int, Path]:
    """The folders of the runs that began beside an output_dir, `-2`, `-3`, by their numbers, in order."""
    numbered = _numbered(base.parent, base.name)
    return {number: folder for number, folder in numbered.items() if _base_of(folder) == base}


def make_first(folders: Iterator[Path]) -> Path:
    """Make the first of these folders that is not there; another may be the user's, or that of a run that has begun."""
    folder = next(folders)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return make_first(folders)
    return folder


def folder_beside(output_dir: str | Path, first: int = 2) -> Path:
    """Make a folder for a new run beside the runs that an `output_dir` has."""
    base = _base_of(Path(output_dir))
    create_output_dir(str(base.parent))
    numbers = itertools.count(max(_beside(base), default=first - 1) + 1)
    folder = make_first(Path(f"{base}-{number}") for number in numbers)
    (folder / _MARK).write_text(json.dumps({"folder": folder.name}) + "\n")
    return folder


def run_to_resume(wanted: str | bool | None, output_dir: str | Path) -> Path | None:
    """The folder of the run to resume: the newest of `output_dir`, or that of a path; None for any other run."""
    base = _named(output_dir)
    runs = [run for run in (base, *_beside(base).values()) if checkpoints(run)] if wanted else []
    if is_path(wanted):
        source = Path(str(wanted)).resolve().parent
        runs = [run for run in runs if run.resolve() == source]
    return runs[-1] if runs else None


def _acquire(folder: Path, patience: float = 0.0) -> FileLock | None:
    """The lock on a run's folder; None where another run holds it for longer than `patience` seconds."""
    create_output_dir(str(folder))
    lock = FileLock(folder / LOCK, thread_local=False)  # a thread may take it (`from_main_process`)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        return None
    for partial in folder.glob(f"{_PARTIAL}*"):  # by interrupted saves
        shutil.rmtree(partial, ignore_errors=True)
    return lock


def lock_to_resume(folder: Path) -> FileLock:
    if (lock := _acquire(folder, _PATIENCE)) is not None:
        return lock
    raise CheckpointError(
        f"{folder} belongs to another run, which has not ended, and two runs would overwrite each other's "
        "checkpoints; wait until that one has ended, end it, or name another output_dir."
    )


def _holds_finished_run(folder: Path) -> bool:
    """A run that failed or was killed before its first checkpoint is not one: it begins again in its folder."""
    record = folder / STEPS
    return record.is_file() and b'"ended": "finished"' in record.read_bytes()


def lock_new(output_dir: str | Path) -> tuple[Path, FileLock]:
    """The locked folder of a new run: `output_dir`, or where that belongs to an earlier run, a new one beside it."""
    folder = Path(output_dir)
    lock = _acquire(folder)
    if lock is not None and run_to_resume(True, folder) is None and not _holds_finished_run(folder):
        return folder, lock
    reason = "belongs to another run, which has not ended"
    if lock is not None:
        lock.release()
        reason = "holds an earlier run, which is left alone"
    new = folder_beside(folder)
    logger.warning(
        f"{folder} {reason}. This run saves to {new}. To continue a run in its folder, pass resume_from_checkpoint the "
        "path of its newest checkpoint."
    )
    return lock_new(new)
