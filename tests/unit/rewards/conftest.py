"""What every test of rewards needs."""

import accelerate
import pytest


@pytest.fixture(scope="package", autouse=True)
def state():
    accelerate.PartialState()  # the logger asks it which process this is
