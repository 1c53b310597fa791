"""Rows of any length as one tensor, and as a padded batch.

A column of the rollout batch is one such tensor (rollouts.batch). Shapes: B rows, T values of the longest, N of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence


def padded(
    rows: Sequence[torch.Tensor], value: float, side: str, multiple: int | None = None, width: int = 1
) -> torch.Tensor:
    """Rows (T, ...) of any length as one (B, T, ...), padded on one side; T is at least `width`, in whole multiples."""
    batch_BT = pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)
    columns = max(batch_BT.size(1), width)
    more = columns + -columns % (multiple or 1) - batch_BT.size(1)
    sides = (more, 0) if side == "left" else (0, more)
    return torch.nn.functional.pad(batch_BT, (*(0, 0) * (batch_BT.dim() - 2), *sides), value=value)


@dataclass(frozen=True)
class Ragged:
    """Rows of any length, one after the other: the values (N, ...) of all, and the length of each."""

    values: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(cls, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Ragged:
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        return cls(torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype), [len(row) for row in tensors])

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.values.split(self.lengths))

    @property
    def bounds(self) -> list[int]:
        """Where each row begins among the values, and where the last one ends."""
        return [0, *itertools.accumulate(self.lengths)]

    def select(self, rows: Sequence[int]) -> Ragged:
        bounds = self.bounds
        parts = [self.values[bounds[row] : bounds[row + 1]] for row in rows]
        return Ragged(torch.cat(parts) if parts else self.values[:0], [self.lengths[row] for row in rows])
