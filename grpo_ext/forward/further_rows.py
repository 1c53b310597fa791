"""Completions of several rows: tokens that were sampled in contexts that do not extend each other.

The row of a completion with one row is its prompt and its tokens. A further row has a context of its own, which may
repeat what earlier rows have, and continues the completion's tokens from some place on. Every token of the completion
belongs to one row, and is trained in its context. Rows are a layout: nothing is counted in rows.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ..batching.micro_batches import RowSize

_NUMBERS = 4  # of each further row in a column


class FurtherRow(NamedTuple):
    start: int  # the place, among the completion's tokens, of the first one that belongs to the row
    context: list[int]  # ids, without padding


class Row(NamedTuple):
    """One row of a completion."""

    prompt: torch.Tensor  # ids, int32: the completion's prompt, or the whole context where that begins otherwise
    shares: bool  # whether it is the completion's
    context: torch.Tensor  # ids after the prompt that do not belong to the row
    start: int  # the completion's tokens that do: from `start` to `stop`
    stop: int
    repeated: int  # tokens, from its first, that an earlier row of the completion begins with too

    @property
    def size(self) -> RowSize:
        return RowSize(len(self.prompt), len(self.context) + self.stop - self.start, self.shares)

    def ids(self, completion: torch.Tensor) -> list[torch.Tensor]:
        return [self.prompt, self.context, completion[self.start : self.stop]]


def encoded(prompt: Sequence[int], ids: Sequence[int], further: Sequence[FurtherRow]) -> tuple[list[int], list[int]]:
    """Columns of a completion: of each further row its start, an earlier row, and tokens that both begin with.

    The fourth number is how many ids follow these in its context; the second column has the ids.
    """
    starts = [0, *(row.start for row in further), len(ids)]
    # a first row without tokens does not run
    rows = [torch.tensor([*prompt, *ids[: starts[1]]] if starts[1] else [])]
    numbers, rest = list[int](), list[int]()
    for row, (start, stop) in zip(further, pairwise(starts[1:]), strict=True):
        context = torch.tensor(row.context)
        same = [_common(context, earlier) for earlier in rows]
        shared = max(same)
        new = row.context[shared:]
        numbers += [start, same.index(shared), shared, len(new)]
        rest += new
        rows.append(torch.cat([context, torch.tensor(ids[start:stop])]))
    return numbers, rest


def decoded(prompt: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor, rest: torch.Tensor) -> list[Row]:
    """The rows of a completion, from its columns."""
    further = numbers.view(-1, _NUMBERS).int().tolist()
    starts = [0, *(start for start, *_ in further), len(ids)]
    rows = [Row(prompt, True, ids[:0], 0, starts[1], 0)]
    used = 0
    for (start, earlier, shared, new), stop in zip(further, starts[2:], strict=True):
        context = torch.cat([torch.cat(rows[earlier].ids(ids))[:shared], rest[used : used + new]])
        shares = torch.equal(context[: len(prompt)], prompt)
        before = len(prompt) if shares else len(context)
        rows.append(Row(context[:before], shares, context[before:], start, stop, shared))
        used += new
    return rows if starts[1] or not further else rows[1:]


def _common(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    different = (one[:length] != other[:length]).nonzero()
    return int(different[0]) if len(different) else length
