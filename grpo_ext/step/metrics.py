"""The logged values of a step: sums over its micro-batches, which one reduction makes step-wide; its tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..algorithms.exact import exact_sum
from ..batching.micro_batches import Form, MicroBatch, StepSizes
from ..runtime.collectives import gather_lists

# name, sum, number of things summed, weight of the micro-batch
_Term = tuple[str, torch.Tensor | float, torch.Tensor | float, float]


@dataclass
class StepMetrics:
    """Collects the logged values of a step over its micro-batches; one reduction at the end makes them step-wide.

    The terms are summed exactly at the end (`math.fsum`), so the digits do not depend on the order of micro-batches or
    the process that ran them. Every process adds the same names, for micro-batches of weight zero too.
    """

    device: torch.device
    totals: set[str] = field(default_factory=set)
    lowest: set[str] = field(default_factory=set)
    terms: list[_Term] = field(default_factory=list)
    highs: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """float64, or float32 on the one kind of device that has no float64."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def add_total(self, name: str, part: torch.Tensor | float, weight: float) -> None:
        """Add a part of a step-wide total, such as the loss."""
        self.totals.add(name)
        self.add(name, part, 0.0, weight)

    def add(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float, weight: float = 1.0) -> None:
        """Add a sum and the number of things summed; the metric is their quotient over the step."""
        total = total.detach() if isinstance(total, torch.Tensor) else total
        self.terms.append((name, total, count, weight))

    def add_tokens(self, name: str, values_BT: torch.Tensor, mask_BT: torch.Tensor, weight: float) -> None:
        """Add token values under a mask; the metric is their mean over the step's tokens."""
        self.add(name, (values_BT * mask_BT).sum(), mask_BT.sum(), weight)

    def add_sequences(self, name: str, values_B1: torch.Tensor, weight: float) -> None:
        """Add one value per sequence; the metric is their mean over the step's completions."""
        self.add(name, values_B1.sum(), float(values_B1.size(0)), weight)

    def add_extreme(self, name: str, values: torch.Tensor, weight: float, lowest: bool = False) -> None:
        """Keep the largest (or lowest) of values over the step; NaN entries do not count."""
        signed = (-values if lowest else values).detach().to(self.dtype)
        if weight == 0.0:
            signed = torch.full_like(signed, -math.inf)
        self.highs.append((name, torch.nan_to_num(signed, nan=-math.inf, neginf=-math.inf).max()))
        if lowest:
            self.lowest.add(name)

    def reduce(self) -> dict[str, float]:
        """Step-wide values, the same on every process; NaN where nothing was counted."""
        values = iter(self._on_host([v for _, *pair, _ in self.terms for v in pair] + [high for _, high in self.highs]))
        rows = [(name, next(values) * weight, next(values) * weight) for name, *_, weight in self.terms]
        rows += [(name, next(values), 0.0) for name, _ in self.highs]
        columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for name, total, count in gather_lists(rows):
            columns[name].append((total, count))
        highs, result = dict(self.highs), {}
        for name, pairs in sorted(columns.items()):
            totals, counts = zip(*pairs)
            if name in highs:
                value = max(totals)
                result[name] = math.nan if value == -math.inf else -value if name in self.lowest else value
            else:
                total, count = exact_sum(totals), exact_sum(counts)
                result[name] = total if name in self.totals else total / count if count else math.nan
        return result

    def _on_host(self, values: Sequence[torch.Tensor | float]) -> list[float]:
        """The values of scalars, which the device sends together."""
        tensors = [value.to(self.device, self.dtype) for value in values if isinstance(value, torch.Tensor)]
        sent = iter(torch.stack(tensors).tolist() if tensors else [])
        return [next(sent) if isinstance(value, torch.Tensor) else value for value in values]


def token_counts(sizes: StepSizes, rows: Sequence[int], plan: Sequence[MicroBatch], form: Form) -> tuple[int, int, int]:
    """Tokens of a step.

    Args:
        rows: those of the whole step that are run.
        plan: the micro-batches of this process.

    Returns:
        Unique tokens of the whole step (each prompt once, each completion); tokens that this process's forwards hold;
        and those among them that are padding.
    """
    batches = [part.rows for part in plan if part.weight]
    computed = sum(sizes.tokens(batch, form) for batch in batches)
    # rows that repeat no prompt
    sharing = [[row] for batch in batches for row in batch] if form == "padded" else batches
    real = computed if form == "packed" else sum(sizes.tokens(batch, "packed") for batch in sharing)
    return sizes.tokens(rows, "packed"), computed, computed - real
