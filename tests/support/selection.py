"""Which cases `make test` takes, where `make test-full` takes all."""

import os
from collections.abc import Container, Iterable
from typing import Any, TypeVar

import pytest

FULL = "GRPO_EXT_TESTS_FULL"  # a variable of the environment with --full, also of launches
Case = TypeVar("Case")


def few_of(cases: Iterable[Any], few: Container[Any]) -> list[Any]:
    """The cases as parameters of a test; those outside `few` are left to `make test-full`."""
    return [pytest.param(case, marks=() if case in few else pytest.mark.full) for case in cases]


def named(name: str, *values: Any, full: Container[str]) -> Any:
    """A case with further values, as a parameter of a test; left to `make test-full` if `full` has its name."""
    return pytest.param(name, *values, marks=pytest.mark.full if name in full else ())


def selected(cases: dict[str, Case], full: Container[str]) -> dict[str, Case]:
    """The cases without those of `full`, which are left to `make test-full`; for the processes of a launch too."""
    return {name: case for name, case in cases.items() if name not in full or FULL in os.environ}
