"""Folders that are built once and then read from a cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, which the first call lets `build` fill; complete or absent at any time.

    The cache is `$GRPO_EXT_CACHE`, or `~/.cache/grpo_ext`.
    """
    cache = Path(os.environ.get("GRPO_EXT_CACHE") or "~/.cache/grpo_ext").expanduser()
    if (cache / name).is_dir():  # before the lock: a filled cache may be read-only
        return cache / name
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if not (cache / name).is_dir():
            with tempfile.TemporaryDirectory(prefix=".building-", dir=cache) as temporary:
                folder = Path(temporary) / name
                folder.mkdir()
                build(folder)
                folder.rename(cache / name)
    return cache / name
