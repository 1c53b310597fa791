"""The plan of an optimizer step: which completions each process runs, in which micro-batches.

Differs from the Trainer's own accumulation: the number of micro-batches may differ between steps and processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from accelerate import Accelerator

from ..batching.micro_batches import (
    Form,
    StepSizes,
    TokenCost,
    assign_rows,
    assign_units,
    canonical_units,
    cut_by_count,
    cut_by_tokens,
)
from ..runtime.collectives import shards_parameters


@dataclass(frozen=True)
class MicroBatch:
    """Rows of the step that one forward sees. `weight` is 0 where a process only keeps the collectives aligned."""

    rows: tuple[int, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class MicroBatchLayout:
    """How a step is laid onto processes and micro-batches; nothing here changes the update.

    Attributes:
        max_rows: completions per micro-batch.
        max_tokens: tokens per micro-batch, or None.
        form: how a forward holds its rows.
        cost: what a token costs, to assign groups to processes by.
        unit_rows: completions per canonical unit, which is then the micro-batch; None cuts by the sizes above.
    """

    max_rows: int
    max_tokens: int | None = None
    form: Form = "padded"
    cost: TokenCost = field(default_factory=TokenCost)
    unit_rows: int | None = None


def fill_up(parts: Sequence[Sequence[int]], at_least: int = 1, filler: int = 0) -> list[MicroBatch]:
    """Micro-batches of the given rows, filled up to `at_least` with micro-batches of weight zero.

    A process without completions needs one: the gradient of every parameter has to exist for the collectives. Sharded
    models gather in every forward, so there all processes need the same number.
    """
    planned = [MicroBatch(tuple(part)) for part in parts]
    return planned + [MicroBatch((filler,), weight=0.0)] * (at_least - len(planned))


def plan_step(
    accelerator: Accelerator, sizes: StepSizes, rows: Sequence[int], layout: MicroBatchLayout
) -> list[MicroBatch]:
    """This process's micro-batches of a step.

    Every process plans for all from the lengths, so no collective is needed.

    Args:
        rows: the rows of the step that are run; the others add nothing to it.
    """
    processes, rank = accelerator.num_processes, accelerator.process_index
    filler = min(range(len(sizes.completions_B)), key=lambda row: sizes.completions_B[row])
    if layout.unit_rows is not None:
        units = canonical_units(sizes, rows, layout.unit_rows)
        return fill_up(assign_units(sizes, units, processes, layout.cost)[rank], 1, filler)
    assigned = assign_rows(sizes, rows, processes, layout.cost)
    own = _cut(sizes, assigned[rank], layout)
    most = max(len(_cut(sizes, part, layout)) for part in assigned) if shards_parameters(accelerator) else 1
    return fill_up(own, max(most, 1), filler)


def _cut(sizes: StepSizes, rows: Sequence[int], layout: MicroBatchLayout) -> list[list[int]]:
    """Largest first: later ones fit into the memory it frees, and a shortage of memory shows at once."""
    if layout.max_tokens is None:
        parts = cut_by_count(sizes, rows, layout.max_rows)
    else:
        parts = cut_by_tokens(sizes, rows, layout.max_rows, layout.max_tokens, layout.form)
    return sorted(parts, key=lambda part: -sizes.tokens(part, layout.form))
