"""Sizes and counts have units that fit."""

from __future__ import annotations

import pytest

from grpo_ext.tools.plan.memory import count, in_units


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (3.2 * 2**20, "3.2 MiB"), (2**30, "1.0 GiB"), (2**41, "2,048.0 GiB")],
)
def test_memory_has_a_unit_that_fits(size, text):
    assert in_units(size) == text


@pytest.mark.parametrize(
    ("number", "text"), [(12_345, "12,345"), (496_000, "0.5M"), (134.5e6, "134M"), (7.6e9, "7.6B"), (70e9, "70B")]
)
def test_parameters_are_counted_in_a_unit_that_fits(number, text):
    assert count(number) == text
