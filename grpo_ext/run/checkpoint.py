"""Checkpoints that are whole or absent: written beside, synced, verified, then renamed.

Differs from transformers, which writes into the final folder file by file: a crash or a full disk while saving leaves
an older checkpoint as the newest here, never a broken one. `checkpoint.json` lists every file with its size and
SHA-256; it is written last, and read before anything else is. Used by the trainer and `grpo-ext`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import CheckpointError

LISTING = "checkpoint.json"
OWN_FILES = "grpo_ext_*"  # what this package adds to a checkpoint; one with such files has a listing
FORMAT = 1
_WEIGHTS = ("*model*.safetensors", "*model*.bin", "pytorch_model_fsdp*", "global_step*")  # of every engine
_STEP = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
_WRITING, _REMOVING = "_writing-", "_removing-"  # the Hub's uploads leave out what begins with an underscore


def file_hash(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _hash_by_hand(file)
        )


def _hash_by_hand(file: Any) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest step first; whole or not."""
    root = Path(folder)
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.match(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LISTING)


def write_listing(folder: Path, about: dict[str, Any]) -> None:
    """List every file of a finished checkpoint, and sync all of it to the disk."""
    files = {}
    for path in _files(folder):
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": file_hash(path)}
        _sync(path)
    content = {"format": FORMAT, **about, "files": files}
    listing = folder / LISTING
    listing.write_text(json.dumps({**content, "sha256": _content_hash(content)}, indent=1) + "\n")
    for path in (listing, *{p.parent for p in _files(folder)}, folder):
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
    """What `write_listing` wrote, or None where there is none (a checkpoint of another trainer).

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / LISTING
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if content.pop("sha256") != _content_hash(content):
            raise ValueError
        newer = content["format"] > FORMAT
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        raise CheckpointError(f"{path} is broken: it is not the listing that was written.") from None
    if newer:
        raise CheckpointError(
            f"{path} was written by a newer version (format {content['format']}, this one reads {FORMAT}): update "
            "grpo_ext."
        )
    return content


def why_broken(folder: str | Path, deep: bool = True, salvage: bool = False) -> str | None:
    """Why a checkpoint must not be loaded, as a sentence that names the file; None if it is whole.

    Args:
        deep: read every file and compare its checksum, not its size alone.
        salvage: its weights are wanted also where its listing is lost.
    """
    root = Path(folder)
    if not root.is_dir():
        return f"{root} {'is no folder' if root.exists() else 'does not exist'}"
    if inside := checkpoints(root):
        return f"{root} is a run, not a checkpoint; the newest in it is {inside[-1]}"
    try:
        listing = read_listing(root)
    except CheckpointError as error:
        return str(error).rstrip(".")
    if listing is None:
        return _why_broken_without_listing(root, salvage)
    for name, expected in listing["files"].items():
        path = root / name
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != expected["size"]:
            return f"{path} has {size} bytes instead of {expected['size']}"
        if deep and file_hash(path) != expected["sha256"]:
            return f"{path} has changed since it was written (SHA-256 differs)"
    return None


def _why_broken_without_listing(root: Path, salvage: bool) -> str | None:
    """The same for a checkpoint of transformers or TRL: whether its files are complete, not whether they changed."""
    if any(root.glob(OWN_FILES)) and not salvage:
        return f"{root} has lost its {LISTING}"
    if not (root / "trainer_state.json").is_file():
        return f"{root} has neither {LISTING} nor trainer_state.json"
    if not any(path for pattern in _WEIGHTS for path in root.glob(pattern)):
        return f"{root} holds no weights"
    return next((f"{path} is cut short or broken" for path in _files(root) if not _opens(path)), None)


def _opens(path: Path) -> bool:
    """Whether a file is complete; True for formats that do not tell."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
        elif path.suffix in (".pt", ".pth", ".bin"):
            with zipfile.ZipFile(path) as archive:
                return archive.testzip() is None
    except Exception:  # whatever the parsers raise
        return False
    return True


def why_not_resumable(folder: str | Path) -> str | None:
    """Why a run cannot go on from a checkpoint: it is broken, or lacks optimizer state or learning-rate schedule.

    DeepSpeed writes both into a folder `global_step*`.
    """
    root = Path(folder)
    if (reason := why_broken(root)) is not None or any(root.glob("global_step*")):
        return reason
    missing = [] if any(root.glob("*optimizer*")) else ["optimizer state"]
    missing += [] if (root / "scheduler.pt").is_file() else ["learning-rate schedule"]
    if not missing:
        return None
    return (
        f"{root} holds no {' and no '.join(missing)} (save_only_model=True writes none), which a resumed run would "
        f"begin anew; a new run can begin with its weights, model={str(root)!r}"
    )


def is_verified(folder: str | Path) -> bool:
    """Whether a checkpoint has a listing to be checked against."""
    return (Path(folder) / LISTING).is_file()


def processes_of(folder: str | Path) -> int | None:
    """How many processes wrote a checkpoint; None where it does not say."""
    listing = read_listing(Path(folder))
    return None if listing is None else listing.get("processes")


def newest_whole(
    folder: str | Path, why_not: Callable[[Path], str | None] = why_broken
) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and why newer ones were skipped.

    Args:
        why_not: why a checkpoint is skipped; None: it is not.
    """
    skipped: list[str] = []
    for path in reversed(checkpoints(folder)):
        reason = why_not(path)
        if reason is None:
            return path, skipped
        skipped.append(reason)
    return None, skipped


def writing_folder(run: str | Path, owner: str = "checkpoint") -> Path:
    """Where a checkpoint of a run is written before it gets its name; on the same file system.

    Args:
        owner: tells the training that writes from any other in the same folder.
    """
    return Path(run) / f"{_WRITING}{owner}"


def remove_unfinished(run: str | Path) -> None:
    """Remove what saves that did not finish left behind; for a run that has the folder to itself."""
    root = Path(run)
    if root.is_dir():
        for path in (*root.glob(f"{_WRITING}*"), *root.glob(f"{_REMOVING}*")):
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Under another name first, so that what is half removed is no checkpoint."""
    doomed = path.with_name(f"{_REMOVING}{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def publish(written: Path, final: Path) -> Path | None:
    """Give a finished checkpoint its name; a folder that has it already is kept under another, which is returned."""
    kept = _keep_aside(final) if final.exists() else None
    os.rename(written, final)
    _sync(final.parent)
    return kept


def _keep_aside(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}.replaced-{number}") for number in itertools.count(1))
    kept = next(name for name in names if not name.exists())
    os.rename(folder, kept)
    return kept


def set_aside_later(checkpoint: str | Path) -> list[Path]:
    """When a run goes on from `checkpoint`: keep the later ones beside it under other names, which are returned.

    They belong to what the run would have been; "latest" must not go back to them.
    """
    path = Path(checkpoint).resolve()
    match = _STEP.match(path.name)
    if match is None:
        return []
    step = int(match[1])
    return [_keep_aside(p) for p in checkpoints(path.parent) if int(p.name.rsplit("-", 1)[1]) > step]


def rotate(run: str | Path, limit: int | None, *protected: str | Path | None) -> list[Path]:
    """Delete old checkpoints beyond `save_total_limit`; never the newest whole one, nor those that are protected.

    Returns:
        What was deleted.
    """
    if limit is None or limit <= 0:
        return []
    found = checkpoints(run)
    safe = {Path(path).resolve() for path in protected if path is not None}
    keep = {path for path in found if path.resolve() in safe}
    whole = next((path for path in reversed(found) if why_broken(path, deep=False) is None), None)
    if whole is not None:
        keep.add(whole)
    removed: list[Path] = []
    for path in found:
        if len(found) - len(removed) <= max(limit, len(keep)):
            break
        if path not in keep:
            _remove(path)
            removed.append(path)
    return removed


def check_space(run: str | Path, needed: int) -> None:
    """Refuse to start a checkpoint that will not fit.

    Raises:
        CheckpointError: with the space that is needed and free.
    """
    free = shutil.disk_usage(run).free
    if free < needed:
        raise CheckpointError(no_space(run, needed, free))


def no_space(run: str | Path, needed: int, free: int) -> str:
    """The message for a disk that is full."""
    return (
        f"a checkpoint needs about {needed / 2**20:.0f} MiB and {run} has {free / 2**20:.0f} MiB free. The older "
        "checkpoints are untouched. Free some space, or use save_total_limit, save_only_model or another output_dir."
    )
