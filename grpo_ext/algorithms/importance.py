"""Importance ratios of the trained policy to the engine that sampled, which the loss is multiplied by.

As TRL's `vllm_importance_sampling_*` (its `_generate_and_score_completions`): a ratio for each token or one for each
completion, cut off or set to zero outside its bounds. Shapes: T tokens of one completion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import ConfigError

LEVELS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class RatioRule:
    """TRL's correction of what vLLM samples.

    Attributes:
        level: one of `LEVELS`: one ratio for each token or each completion; cut off, or zero, outside the bounds.
        lowest, highest: the bounds; None: no bound.
    """

    level: str
    lowest: float | None
    highest: float | None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ConfigError(f"vllm_importance_sampling_mode={self.level!r} is unknown; use {', '.join(LEVELS)}.")

    @property
    def of_sequences(self) -> bool:
        """Whether a completion has one ratio."""
        return self.level.startswith("sequence")

    def ratios(self, old_T: torch.Tensor, sampling_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
        """The ratios of a completion's tokens, (T,), or that of the completion, (1,).

        Args:
            old_T: log-probabilities of the policy.
            sampling_T: those of the engine; the ratio is 1 where one is NaN.
            mask_T: 1 on tokens that carry loss.
        """
        difference = torch.nan_to_num((old_T - sampling_T) * mask_T, nan=0.0)
        if self.of_sequences:
            difference = difference.sum(dim=-1, keepdim=True)
        ratios = torch.exp(difference)
        lowest = -math.inf if self.lowest is None else self.lowest
        bounded = ratios.clamp(lowest, math.inf if self.highest is None else self.highest)
        return bounded if self.level.endswith("truncate") else ratios.where(ratios == bounded, 0.0)
