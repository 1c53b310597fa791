"""What every unit test may need."""

import accelerate
import pytest


@pytest.fixture(autouse=True)
def state():
    accelerate.PartialState(cpu=True)  # the package's loggers ask it which process this is
