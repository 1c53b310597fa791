"""A step of completions in float64 on which losses are compared."""

from typing import Any

import torch

from grpo_ext.algorithms.losses import LossConfig, TokenBatch

WIDTH = 5
LENGTHS = (5, 3, 0, 4, 1, 2, 5, 0)  # tokens that carry loss; two completions have none
TOKENS = [5, 4, 2, 4, 1, 4, 5, 0]  # all of each completion; one has none
OPTIONS = {
    "plain": {},
    "delta": {"delta": 1.3},
    "beta": {"beta": 0.1, "use_bias_correction_kl": False},
    "beta, bias correction": {"beta": 0.1, "use_bias_correction_kl": True},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "entropy keep": {"keep": True},
    "sequence mask": {"sequence_mask_low": 0.9, "sequence_mask_high": 1.1},
    "trust region tv": {"trust_region": "tv", "trust_region_threshold": 0.03},
    "trust region kl": {"trust_region": "kl", "trust_region_threshold": 0.003},
    "sampling ratio per sequence": {"correct_sampling": True, "sampling": "sequence"},
    "everything": {
        **{"delta": 1.3, "beta": 0.1, "off_policy_mask_threshold": 0.05},
        **{"keep": True, "correct_sampling": True, "sampling": "token"},
    },
}


def rows_of(lengths: list[int], values: torch.Tensor) -> torch.Tensor:
    """Padded values (B, T) one row after the other, (S,); values of rows, (B,) or (B, 1), as (B, 1)."""
    if values.dim() == 1 or values.size(1) == 1 != max(lengths):
        return values.reshape(-1, 1)
    return torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])


def token_batch(
    logps: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, lengths: list[int] | None = None, **others: Any
) -> TokenBatch:
    """A micro-batch of padded rows (B, T); without `lengths` all tokens of the rows count as theirs."""
    lengths = [logps.size(1)] * len(logps) if lengths is None else lengths
    flat = [rows_of(lengths, values) for values in (logps, mask, advantages)]
    others = {name: rows_of(lengths, values) for name, values in others.items() if values is not None}
    return TokenBatch(*flat, torch.tensor(lengths), **others)


def make(loss_type: str, level: str, option: str) -> tuple[LossConfig, TokenBatch]:
    """A configuration and a step of 8 completions in float64, with ratios on both sides of every clip."""
    options = dict(OPTIONS[option])
    keep, sampling = options.pop("keep", False), options.pop("sampling", None)
    epsilon = {"epsilon_low": 0.1, "epsilon_high": 1.2 if loss_type == "cispo" else 0.15}
    cfg = LossConfig(loss_type, importance_sampling_level=level, max_completion_length=6, **epsilon, **options)
    generator = torch.Generator().manual_seed(20)
    shape = (len(LENGTHS) - 1, WIDTH)

    def noise(scale: float) -> torch.Tensor:
        """The last completion has no tokens."""
        return torch.nn.functional.pad(
            scale * torch.randn(shape, generator=generator, dtype=torch.float64), (0, 0, 0, 1)
        )

    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    # what is outside the mask is not zero, so that a loss which read it would not add up
    logps = -1.5 + noise(0.4)
    old, reference = logps + noise(0.3), logps + noise(0.3)
    # outside the mask TRL's ratio is exactly one
    ratio = torch.exp(noise(0.2) * mask) if sampling == "token" else torch.exp(noise(0.2)[:, :1]) if sampling else None
    batch = token_batch(
        logps,
        mask,
        torch.tensor([0.7, -1.2, 0.4, 0.0, 1.5, -0.3, -0.9, 0.6], dtype=torch.float64),
        TOKENS,
        old_logps_S=old,
        ref_logps_S=reference,
        sampling_logps_S=old + noise(0.1) if option in ("off-policy mask", "everything") else None,
        sampling_ratio=ratio,
        entropy_keep_S=(noise(1.0) > -0.5).double() if keep else None,
    )
    batch.logps_S.requires_grad_()
    return cfg, batch
