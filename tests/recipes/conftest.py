"""What the recipes' tests share: a cache with the demo's model."""

import hashlib
from pathlib import Path

import pytest

from grpo_ext.demo import task

# of the 400 of the warm start: this model is made in a seventh of the time, and answers 0.20 of the held-out words.
# Tests of both models ask for more than 0.1 and less than 0.35
FEW_STEPS = 60


@pytest.fixture(scope="session")
def cache(lasting, request):
    """The folder for `GRPO_EXT_CACHE`, with the demo's model in it; made again when the code that makes it changes.

    Only with --full is it the one that users get; `make test` has that of a shorter warm start.
    """
    steps = task.STEPS if request.config.getoption("--full") else FEW_STEPS
    folder = lasting(f"demo-{steps}-{hashlib.sha256(Path(task.__file__).read_bytes()).hexdigest()[:16]}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GRPO_EXT_CACHE", str(folder))
        patched.setattr(task, "STEPS", steps)
        task.load_demo()
    return folder
