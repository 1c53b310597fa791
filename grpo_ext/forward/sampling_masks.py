"""The tokens that truncated sampling chose from, replayed in every later forward.

Truncated sampling (top-p, top-k, min-p, ...) draws from probabilities renormalised over the tokens that a filter
kept, so log-probabilities are over those tokens ("keep sampling mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
In TRL they are over the whole vocabulary. Shapes: T tokens of a completion, S tokens of all completions, K ids of all
tokens, R x C one tile of logits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class SamplingMasks(NamedTuple):
    # where each token's ids begin, and where the last end; in NumPy, so that no tile waits for the device
    bounds: np.ndarray
    ids_K: torch.Tensor  # the kept ids, token after token
    rows_K: torch.Tensor  # the token of each id
    kinds_S: torch.Tensor  # 0: a token with ids; 1: the whole vocabulary; 1 + m: the m-th set of `suppressed`
    suppressed: Sequence[torch.Tensor]

    @classmethod
    def of(
        cls,
        counts_S: torch.Tensor,  # `kept_counts` of forward.columns
        ids_K: torch.Tensor,
        suppressed: Sequence[torch.Tensor],
        among: torch.Tensor | None = None,
    ) -> "SamplingMasks | None":
        """The masks of a batch, or `among` its tokens; None where all were sampled from the whole vocabulary."""
        if among is not None:
            chosen_S = torch.zeros_like(counts_S, dtype=torch.bool).index_fill(0, among, True)
            ids_K, counts_S = ids_K[chosen_S.repeat_interleave(counts_S.clamp(min=0))], counts_S[among]
        if not counts_S.any():
            return None
        counts = counts_S.clamp(min=0).long()
        rows_K = torch.arange(len(counts)).repeat_interleave(counts)
        kinds_S = torch.where(counts_S > 0, 0, 1 - counts_S).long()
        return cls(np.append(0, counts.cumsum(0)), ids_K, rows_K, kinds_S, suppressed)

    def removed(self, rows: slice, columns: slice) -> torch.Tensor:
        """True on the logits (R, C) of a tile whose tokens were not kept."""
        ids, width = slice(self.bounds[rows.start], self.bounds[rows.stop]), columns.stop - columns.start
        removed_MC = self.kinds_S.new_zeros(2 + len(self.suppressed), width + 1, dtype=torch.bool)
        removed_MC[0] = True
        for removed_C, tokens in zip(removed_MC[2:], self.suppressed, strict=True):
            removed_C[_local(tokens, columns)] = True
        removed_RC = removed_MC[self.kinds_S[rows]]
        removed_RC[self.rows_K[ids] - rows.start, _local(self.ids_K[ids], columns)] = False
        return removed_RC[:, :width]


def _local(ids: torch.Tensor, columns: slice) -> torch.Tensor:
    """The columns of ids in a tile; the column after its last for ids of other tiles."""
    inside = (ids >= columns.start) & (ids < columns.stop)
    return torch.where(inside, ids, columns.stop).long() - columns.start
