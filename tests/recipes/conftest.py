"""What the recipes' tests share: a cache with the demo's model."""

import hashlib
from pathlib import Path

import pytest

from grpo_ext.demo import task

FEW_STEPS = 60  # of the warm start: the model has more to learn, and is made in a seventh of the time


@pytest.fixture(scope="session")
def cache(lasting, request):
    """The folder for `GRPO_EXT_CACHE`, with the demo's model in it; made again when the code that makes it changes.

    The model of users with --full, and one of a shorter warm start without.
    """
    steps = task.STEPS if request.config.getoption("--full") else FEW_STEPS
    folder = lasting(f"demo-{steps}-{hashlib.sha256(Path(task.__file__).read_bytes()).hexdigest()[:16]}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GRPO_EXT_CACHE", str(folder))
        patched.setattr(task, "STEPS", steps)
        task.load_demo()
    return folder
