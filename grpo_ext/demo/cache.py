"""Folders that are made once and found again: whole or absent, whoever else makes them at the same time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def default_cache_dir() -> Path:
    """`$GRPO_EXT_CACHE`, else `~/.cache/grpo_ext`."""
    return Path(os.environ.get("GRPO_EXT_CACHE") or "~/.cache/grpo_ext").expanduser()


def cached_folder(name: str, make: Callable[[Path], None], cache_dir: Path | None = None) -> Path:
    """The folder `name` of the cache; on the first call `make` fills one beside it, which is then renamed."""
    cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir)
    target = cache_dir / name
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_dir))
    try:
        make(beside)
        try:
            os.replace(beside, target)
        except OSError:
            # another process finished first; a folder under this name is always complete, so its content serves as well
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target
