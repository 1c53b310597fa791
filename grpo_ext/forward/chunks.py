"""Scoring in chunks: how rows are cut for forwards without gradients, and the results put together again.

Differs from TRL, which cuts by a number of rows alone: a chunk keeps a token budget, canonical units in bitwise mode,
and as many forwards on every process where a forward is a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..batching.micro_batches import Form, StepSizes, canonical_units, cut_in_order
from ..batching.sizes import group_numbers
from ..runtime.out_of_memory import Halving
from .lm_head import Scores
from .rows import TokenRows


@contextmanager
def without_checkpointing(model: Any, checkpointing_kwargs: dict[str, Any] | None) -> Iterator[None]:
    """Inside, `model` does not checkpoint its layers, which would only cost time where there are no gradients."""
    enabled = model.is_gradient_checkpointing
    if enabled:
        model.gradient_checkpointing_disable()
    try:
        yield
    finally:
        if enabled:
            model.gradient_checkpointing_enable(checkpointing_kwargs)


@dataclass(frozen=True)
class Chunking:
    """How `score_in_chunks` cuts rows.

    Attributes:
        max_rows, max_tokens: of a chunk; None: as many as there are.
        form: how a chunk is scored.
        multiple: of which the widths of a chunk are.
        align: from this process's number of chunks to the number to score; further ones repeat and are thrown away.
        units: (rows per group, rows per canonical unit): cut like that whatever the sizes above say, or None.
        halving: cuts a chunk that does not fit into memory.
    """

    max_rows: int | None = None
    max_tokens: int | None = None
    form: Form = "padded"
    multiple: int = 1
    align: Callable[[int], int] = int
    units: tuple[int, int] | None = None
    halving: Halving | None = None

    def cut(self, rows: TokenRows) -> list[slice]:
        """The chunks, in order."""
        if self.units is None:
            lengths = (list(rows.prompts_B), list(rows.completions_B), list(rows.same_prompt))
            return cut_in_order(*lengths, self.max_rows or len(rows), self.max_tokens, self.form, self.multiple)
        group, unit = self.units
        sizes = StepSizes(group_numbers(len(rows), group), [], [])
        return [slice(part[0], part[-1] + 1) for part in canonical_units(sizes, range(len(rows)), unit)]


def score_in_chunks(score: Callable[[TokenRows], Scores], rows: TokenRows, chunking: Chunking) -> list[Scores]:
    """The scores of the chunks, in the order of the rows."""
    parts = chunking.cut(rows)

    def work(piece: Sequence[int]) -> Scores:
        return score(rows.part(slice(piece[0], piece[-1] + 1)))

    found: list[Scores] = []
    for number in range(chunking.align(len(parts))):
        part = parts[min(number, len(parts) - 1)]
        piece = range(part.start, part.stop)
        results = [work(piece)] if chunking.halving is None else chunking.halving.run(piece, work)
        found += results if number < len(parts) else []
    return found


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of chunks as those of all their rows; entropies where there are any, the router's output of one."""
    if len(parts) == 1:
        return parts[0]
    entropies = [scores.entropies_S for scores in parts if scores.entropies_S is not None]
    return Scores(torch.cat([scores.logps_S for scores in parts]), torch.cat(entropies) if entropies else None)
