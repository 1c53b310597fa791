"""What the recipes' tests share: a cache with the demo's model."""

import hashlib
from pathlib import Path

import pytest

from grpo_ext.demo import task, warm_start


@pytest.fixture(scope="session")
def cache(lasting):
    """The folder for `GRPO_EXT_CACHE`, with the demo's model in it; made again when the code that makes it changes."""
    code = b"".join(Path(module.__file__).read_bytes() for module in (task, warm_start))
    folder = lasting(f"demo-{hashlib.sha256(code).hexdigest()[:16]}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GRPO_EXT_CACHE", str(folder))
        task.load_demo()
    return folder
