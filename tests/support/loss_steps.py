"""A step of completions in float64 on which losses are compared."""

import torch

from grpo_ext.algorithms.losses import LossConfig, TokenBatch

WIDTH = 5
LENGTHS = (5, 3, 0, 4, 1, 2, 5)  # tokens that carry loss; one completion has none
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


def make(loss_type: str, level: str, option: str) -> tuple[LossConfig, TokenBatch]:
    """A configuration and a step of 7 completions in float64, with ratios on both sides of every clip."""
    options = dict(OPTIONS[option])
    keep, sampling = options.pop("keep", False), options.pop("sampling", None)
    epsilon = {"epsilon_low": 0.1, "epsilon_high": 1.2 if loss_type == "cispo" else 0.15}
    cfg = LossConfig(loss_type, importance_sampling_level=level, max_completion_length=6, **epsilon, **options)
    generator = torch.Generator().manual_seed(20)
    shape = (len(LENGTHS), WIDTH)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    # what is outside the mask is not zero, so that a loss which read it would not add up
    logps = -1.5 + noise(0.4)
    old, reference = logps + noise(0.3), logps + noise(0.3)
    # outside the mask TRL's ratio is exactly one
    ratio = torch.exp(noise(0.2) * mask) if sampling == "token" else torch.exp(noise(0.2)[:, :1]) if sampling else None
    batch = TokenBatch(
        logps.requires_grad_(),
        mask,
        torch.tensor([0.7, -1.2, 0.4, 0.0, 1.5, -0.3, -0.9], dtype=torch.float64),
        old_logps_BT=old,
        ref_logps_BT=reference,
        sampling_logps_BT=old + noise(0.1) if option in ("off-policy mask", "everything") else None,
        sampling_ratio=ratio,
        entropy_keep_BT=(noise(1.0) > -0.5).double() if keep else None,
    )
    return cfg, batch
