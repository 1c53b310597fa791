"""What the recipes' tests share: a cache with the demo's model."""

import hashlib
from pathlib import Path

import pytest

from grpo_ext.demo import task


@pytest.fixture(scope="session")
def cache(lasting):
    """The folder for `GRPO_EXT_CACHE`, with the demo's model in it; made again when the code that makes it changes."""
    folder = lasting(f"demo-{hashlib.sha256(Path(task.__file__).read_bytes()).hexdigest()[:16]}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GRPO_EXT_CACHE", str(folder))
        task.load_demo()
    return folder
