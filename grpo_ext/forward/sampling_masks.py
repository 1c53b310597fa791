"""The tokens that truncated sampling chose from, replayed in every later forward.

Truncated sampling (top-p, top-k, min-p, ...) draws from probabilities renormalised over the tokens that a filter
kept, so log-probabilities are taken over those ("keep sampling mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
TRL takes them over the whole vocabulary. Shapes: S tokens, K ids of all of them, R x C one tile of logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import send_to_device


def first_tokens(counts_T: torch.Tensor, ids_K: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The counts and ids of the first tokens of a row of `KeptTokens`."""
    counts_T = counts_T[:tokens]
    return counts_T, ids_K[: int(counts_T.clamp(min=0).sum())]


@dataclass(frozen=True)
class KeptTokens:
    """Which tokens each completion token of some rows was sampled from; on the CPU.

    Attributes:
        counts_B: for each row (T,) int32: how many ids a token was sampled from; 0: the whole vocabulary; -m: all but
            the tokens that set m of the run suppresses, counted from 1.
        ids_B: for each row the ids of its tokens (K,) int32, token after token.
    """

    counts_B: Sequence[torch.Tensor]
    ids_B: Sequence[torch.Tensor]

    @classmethod
    def cut(cls, counts_B: Sequence[torch.Tensor], ids_B: Sequence[torch.Tensor], lengths: Sequence[int]) -> KeptTokens:
        """The first tokens of each row, as many as `lengths` says."""
        rows = [first_tokens(*row) for row in zip(counts_B, ids_B, lengths)]
        return cls([counts_T for counts_T, _ in rows], [ids_K for _, ids_K in rows])

    def of(self, rows: range) -> KeptTokens:
        """Consecutive rows."""
        part = slice(rows.start, rows.stop)
        return KeptTokens(self.counts_B[part], self.ids_B[part])

    def masks(self, suppressed: Sequence[torch.Tensor]) -> SamplingMasks | None:
        """As a forward takes them, still on the CPU; None where every token was sampled from the whole vocabulary.

        Args:
            suppressed: the sets of suppressed ids that the counts refer to.
        """
        counts_S = torch.cat([*self.counts_B])
        if not counts_S.any():
            return None
        counts = counts_S.clamp(min=0).long()
        return SamplingMasks(
            bounds=[0, *itertools.accumulate(counts.tolist())],
            ids_K=torch.cat([*self.ids_B]),
            rows_K=torch.arange(len(counts)).repeat_interleave(counts),
            kinds_S=torch.where(counts_S > 0, 0, 1 - counts_S).long(),
            suppressed=tuple(suppressed),
        )


@dataclass(frozen=True)
class SamplingMasks:
    """The masks of the logits of S tokens, made tile by tile.

    Attributes:
        bounds: where the ids of each token begin, and where the last end; on the host, so that no tile waits for the
            device.
        ids_K: the kept ids, token after token; rows_K: the token that each belongs to.
        kinds_S: 0 for a token with ids, 1 for one of the whole vocabulary, 1 + m for set m of `suppressed`.
    """

    bounds: list[int]
    ids_K: torch.Tensor
    rows_K: torch.Tensor
    kinds_S: torch.Tensor
    suppressed: tuple[torch.Tensor, ...] = ()

    @property
    def tensors(self) -> dict[str, Any]:
        """The attributes that go to a device."""
        return {name: value for name, value in vars(self).items() if name != "bounds"}

    def on(self, device: torch.device) -> SamplingMasks:
        """The same on a device; `device_map` may put the head on another one."""
        return self if self.ids_K.device == device else replace(self, **send_to_device(self.tensors, device))

    def removed(self, rows: slice, columns: slice) -> torch.Tensor:
        """True on the logits (R, C) of a tile whose tokens were not kept."""
        ids, width = slice(self.bounds[rows.start], self.bounds[rows.stop]), columns.stop - columns.start
        removed_MC = self.kinds_S.new_zeros(2 + len(self.suppressed), width + 1, dtype=torch.bool)
        removed_MC[0] = True
        for removed_C, tokens in zip(removed_MC[2:], self.suppressed):
            removed_C[_local(tokens, columns)] = True
        removed_RC = removed_MC[self.kinds_S[rows]]
        removed_RC[self.rows_K[ids] - rows.start, _local(self.ids_K[ids], columns)] = False
        return removed_RC[:, :width]


def _local(ids: torch.Tensor, columns: slice) -> torch.Tensor:
    """The columns of ids in a tile; the one after its last for ids of other tiles."""
    inside = (ids >= columns.start) & (ids < columns.stop)
    return torch.where(inside, ids, columns.stop).long() - columns.start
