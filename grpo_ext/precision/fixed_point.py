"""Sums whose bits depend on neither the order nor the grouping of their terms.

Floating-point addition is not associative; integer addition is. Each term is rounded once to a multiple of
2**-FRACTION_BITS and added as a 64-bit integer, so any order, any grouping and any number of processes give the same
sum. Overflow is detected, never wrapped around. Used by step.gradients in bitwise mode.
"""

import math

import torch

from ..errors import PrecisionError

FRACTION_BITS = 48  # steps of 3.6e-15; sums up to 16384
# elements converted at a time: 16 MiB as float32 (float64: 32) and 32 as int64, whatever the size of the tensor
_SLICE = 2**22


def largest_term(terms: int) -> float:
    """The largest of `terms` terms whose sum cannot overflow."""
    return 2.0 ** (62 - FRACTION_BITS) / max(terms, 1)


def check_terms(name: str, terms: int, largest: float) -> None:
    """Refuse a gradient whose `largest` of `terms` terms, over all processes, is out of range."""
    limit = largest_term(terms)
    if not math.isfinite(largest):
        raise PrecisionError(
            f"the gradient of {name} is not finite, so it cannot be summed; lower the learning rate, or look for the "
            "first reward, log-probability or weight that is not finite."
        )
    if largest > limit:
        raise PrecisionError(
            f"a gradient element of {name} is {largest:.3g}; {terms} terms with {FRACTION_BITS} fraction bits "
            f"hold up to {limit:.3g}. Scale the rewards down, or turn bitwise_invariant off."
        )


def to_fixed(values: torch.Tensor) -> torch.Tensor:
    """Counts of 2**-FRACTION_BITS; only for values within `largest_term`."""
    # a power of two changes the exponent alone, which float16 has no room for
    return (values.to(torch.promote_types(values.dtype, torch.float32)) * 2.0**FRACTION_BITS).round_().to(torch.int64)


class FixedPointSum:
    def __init__(self, like: torch.Tensor) -> None:
        self.total = torch.zeros(like.shape, dtype=torch.int64, device=like.device)
        self.largest = torch.zeros((), dtype=torch.float32, device=like.device)

    def add(self, values: torch.Tensor) -> None:
        """`check_terms` checks later whether the term fits, so nothing waits for the device here."""
        for part, sums in zip(values.detach().flatten().split(_SLICE), self.total.view(-1).split(_SLICE), strict=True):
            # a maximum with NaN is NaN; float32 covers smaller types, and float64 terms beyond its range are refused
            self.largest = torch.maximum(self.largest, part.abs().max().float())
            sums += to_fixed(part)

    def value(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum, rounded to float64 and then to `dtype`."""
        values = torch.empty(self.total.shape, dtype=dtype, device=self.total.device)
        for part, result in zip(self.total.flatten().split(_SLICE), values.view(-1).split(_SLICE), strict=True):
            result.copy_(part.to(torch.float64).mul_(2.0**-FRACTION_BITS))
        return values
