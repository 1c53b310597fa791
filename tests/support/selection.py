"""Which cases `make test` takes, where `make test-full` takes all."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def few_of(cases: Iterable[Any], few: Container[Any]) -> list[Any]:
    """The cases as parameters of a test; those outside `few` are left to `make test-full`."""
    return [pytest.param(case, marks=() if case in few else pytest.mark.full) for case in cases]
