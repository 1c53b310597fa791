"""What the recipes' tests share: one cache for the demo's model, so that it is made once."""

import os

import pytest

from grpo_ext.demo.task import load_demo


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The folder for `GRPO_EXT_CACHE`, with the demo's model in it; one for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GRPO_EXT_CACHE", str(folder))
        load_demo()
    return folder
