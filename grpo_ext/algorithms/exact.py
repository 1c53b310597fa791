"""Sums and means rounded once, so that the order of the terms does not matter."""

import math
from collections.abc import Sequence


def exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once; terms may be infinite or NaN."""
    try:
        return math.fsum(values)
    except ValueError:  # infinity and its opposite
        return math.nan


def exact_mean(values: Sequence[float]) -> float:
    return exact_sum(values) / len(values)
