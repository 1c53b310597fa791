"""What the recipes' tests share: one cache for the demo's model, so that it is made once."""

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The folder for `GRPO_EXT_CACHE`; the first run that needs the demo's model makes it there."""
    return tmp_path_factory.mktemp("cache")
