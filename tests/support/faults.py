"""Planted faults: one line of the package changed, and the tests of `make test` that have to fail then."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One line that is changed.

    Attributes:
        path: of the file, under grpo_ext/.
        before: text that occurs once in the file.
        after: what stands there instead.
        tests: pytest arguments of the tests that catch it, in `make test`.
    """

    path: str
    before: str
    after: str
    tests: str


FAULTS: list[Fault] = []
