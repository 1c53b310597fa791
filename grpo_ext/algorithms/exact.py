"""Sums and means rounded once, so that the order of the terms does not matter."""

from __future__ import annotations

import math
from collections.abc import Sequence


def exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once, so that the order does not matter; also where terms are not finite."""
    try:
        return math.fsum(values)
    except ValueError:  # infinity and its opposite
        return math.nan


def exact_mean(values: Sequence[float]) -> float:
    """The mean of at least one value, summed exactly, so that the order does not matter."""
    return exact_sum(values) / len(values)
