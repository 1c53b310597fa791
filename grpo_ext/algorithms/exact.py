"""Sums and means rounded once, so that the order of the terms does not matter."""

from __future__ import annotations

import math
from collections.abc import Sequence


def exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once, so that the order does not matter; also where terms are not finite."""
    if all(math.isfinite(value) for value in values):
        return math.fsum(values)
    return math.nan if any(v != v for v in values) or {math.inf, -math.inf} <= set(values) else max(values, key=abs)


def exact_mean(values: Sequence[float]) -> float:
    """The mean of at least one value, summed exactly, so that the order does not matter."""
    return exact_sum(values) / len(values)
