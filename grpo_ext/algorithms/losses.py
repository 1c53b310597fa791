"""Per-token losses of the GRPO family, and the weights that turn them into one sum per optimizer step.

Differs from TRL's `GRPOTrainer._compute_loss` in one point: no denominator is computed here. The loss of a step is
`sum(weights * per_token_loss)` with weights fixed by step-wide counts, so any partition of the step adds up to it.
Called by step.loss for every micro-batch. Shapes: B completions, T completion tokens (padded), (B, 1) per sequence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..errors import ConfigError
from .policy_losses import POLICY_LOSSES, PPO_CLIPPED, check_loss_type, registered_loss

_LARGEST_RATIO = 20.0  # that weights a token in a trust region (DPPO, section 5.4, in verl)
_LARGEST_LOG_RATIO = 60.0  # where a loss does not depend on the ratio; float32 overflows from 88.7 on
# the default aggregation of a loss type; "token_mean" for the others
_USUAL_AGGREGATION = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dr_grpo": "sequence_sum_norm",
    "luspo": "sequence_sum",
}
RATIO_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm", "prompt_mean")


@dataclass(frozen=True)
class LossConfig:
    """The settings of the loss; fields without a comment are TRL's `GRPOConfig` fields of the same names."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    off_policy_mask_threshold: float | None = None
    max_completion_length: int = 1
    correct_sampling: bool = False  # multiply by the ratio of the policy to the engine that sampled
    aggregation: str | None = None  # one of `AGGREGATIONS`; None: the loss type's default
    entropy_coefficient: float | None = None  # of the entropy bonus in this step; None without a bonus
    router_coefficient: float | None = None  # of the MoE load-balancing loss; None without one
    teacher_kl_coef: float | None = None  # of the teacher's advantages; None without a teacher
    log_ratios: bool = False  # log the ratios of the policy to the weights that sampled
    trust_region: str | None = None  # "tv" or "kl" instead of clipped ratios
    trust_region_threshold: float | None = None  # of probability ("tv") or nats ("kl")
    sequence_mask_low: float | None = None  # bounds of a completion's geometric mean ratio to the sampler
    sequence_mask_high: float | None = None

    @property
    def weighting(self) -> str:
        usual = _USUAL_AGGREGATION.get(self.loss_type, "token_mean")
        return usual if self.aggregation is None else self.aggregation

    def __post_init__(self) -> None:
        check_loss_type(self.loss_type)
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ConfigError(
                f"importance_sampling_level={self.importance_sampling_level!r} is unknown; use 'token' or 'sequence'."
            )
        if self.weighting not in AGGREGATIONS:
            names = ", ".join(AGGREGATIONS)
            raise ConfigError(f"loss_aggregation={self.aggregation!r} is unknown; use one of {names}.")
        kind, threshold, level = self.trust_region, self.trust_region_threshold, self.importance_sampling_level
        if (kind is None) != (threshold is None):
            raise ConfigError(
                f"trust_region={kind!r} with trust_region_threshold={threshold!r}: set both or neither; DPPO uses 0.15 "
                "for 'tv' (a difference of probabilities) and 0.05 for 'kl' (nats)."
            )
        own, fits = self.loss_type in POLICY_LOSSES, kind is None or self.loss_type in PPO_CLIPPED
        if (own or kind) and not (fits and level == "token" and self.delta is None):
            bound = f"trust_region={kind!r}" if kind else f"loss_type={self.loss_type!r}, a registered loss,"
            raise ConfigError(
                f"{bound} computes ratios and bounds itself, and this run has loss_type={self.loss_type!r}, "
                f"importance_sampling_level={level!r}, delta={self.delta}; use 'token' and no delta, and with a "
                f"trust region use one of {', '.join(PPO_CLIPPED)}."
            )


@dataclass(frozen=True)
class StepCounts:
    """Step-wide denominators, counted once over all processes before the first forward."""

    completions: float
    tokens: float  # tokens with a loss
    entropy_tokens: float  # tokens of the entropy bonus: those above the entropy quantile, or all
    group_tokens: Mapping[int, int] = field(default_factory=dict)  # `tokens` by group; for "prompt_mean"
    items: float | None = None  # TRL's denominator of a token mean, if a user's override of the rollout changed it


@dataclass
class TokenBatch:
    logps_BT: torch.Tensor  # with the gradient
    mask_BT: torch.Tensor
    advantages_B: torch.Tensor
    old_logps_BT: torch.Tensor | None = None  # None on-policy: the ratio is one, with the policy's gradient
    ref_logps_BT: torch.Tensor | None = None
    sampling_logps_BT: torch.Tensor | None = None  # of an inference engine
    sampling_ratio: torch.Tensor | None = None
    entropy_keep_BT: torch.Tensor | None = None  # 1 on tokens above the entropy quantile

    @property
    def advantages(self) -> torch.Tensor:
        """The advantages: (B, 1), or (B, T) if a subclass returns one per token."""
        return self.advantages_B[:, None] if self.advantages_B.dim() == 1 else self.advantages_B


@dataclass
class TokenLoss:
    loss_BT: torch.Tensor
    ratio: torch.Tensor
    kl_BT: torch.Tensor | None = None
    vespo_phi_B1: torch.Tensor | None = None
    outside_region_BT: torch.Tensor | None = None  # True on tokens that the trust region leaves out
    outside_bounds_B1: torch.Tensor | None = None  # True on completions that the sequence mask leaves out


@dataclass(frozen=True)
class RatioRule:
    """TRL's correction for vLLM's samples: ratios of the policy to the engine, which multiply the loss."""

    mode: str  # one of `RATIO_MODES`: per token or per completion; clipped, or zero, outside the bounds
    lowest: float | None
    highest: float | None

    def __post_init__(self) -> None:
        if self.mode not in RATIO_MODES:
            raise ConfigError(f"vllm_importance_sampling_mode={self.mode!r} is unknown; use {', '.join(RATIO_MODES)}.")

    @property
    def of_sequences(self) -> bool:
        return self.mode.startswith("sequence")

    def ratios(self, old_T: torch.Tensor, sampling_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
        """Ratios of the tokens, (T,), or of the completion, (1,); 1 where a log-probability of the engine is NaN."""
        difference = torch.nan_to_num((old_T - sampling_T) * mask_T, nan=0.0)
        if self.of_sequences:
            difference = difference.sum(dim=-1, keepdim=True)
        ratios = torch.exp(difference)
        lowest = -math.inf if self.lowest is None else self.lowest
        bounded = ratios.clamp(lowest, math.inf if self.highest is None else self.highest)
        return bounded if self.mode.endswith("truncate") else ratios.where(ratios == bounded, 0.0)


def _sequence_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return (values_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1.0)


def off_policy_keep(
    advantages_B1: torch.Tensor,
    logps_BT: torch.Tensor,
    sampling_logps_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """1.0 for sequences to keep, (B, 1): non-negative advantage or mean KL below `threshold` (DeepSeek-V3.2, eq. 9)."""
    kl_BT = torch.nan_to_num(sampling_logps_BT - logps_BT.detach(), nan=0.0)
    return ((advantages_B1 >= 0) | (_sequence_mean(kl_BT, mask_BT) <= threshold)).to(logps_BT.dtype)


@torch.no_grad()
def outside_trust_region(
    kind: str, threshold: float, logps_BT: torch.Tensor, old_logps_BT: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """True, (B, T), on tokens that moved beyond the threshold the way their advantage points (DPPO, arXiv 2602.04879).

    The distance is that of two outcomes, the token or another one: Binary-TV, a difference of probabilities, or
    Binary-KL of the old policy to the new, in nats. A token whose old log-probability is NaN is inside.
    """
    new_BT, old_BT = logps_BT.exp(), old_logps_BT.exp()
    distance_BT = (new_BT - old_BT).abs()
    if kind == "kl":
        # the probability of another token, which near zero would be lost in 1 - exp(...)
        other_new_BT, other_old_BT = (-torch.expm1(logps).clamp(max=-1e-8) for logps in (logps_BT, old_logps_BT))
        distance_BT = old_BT * (old_logps_BT - logps_BT) + other_old_BT * (other_old_BT / other_new_BT).log()
    return ((new_BT - old_BT) * advantages > 0) & (distance_BT > threshold)


@torch.no_grad()
def outside_sequence_bounds(
    logps_BT: torch.Tensor, sampling_logps_BT: torch.Tensor, mask_BT: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """True, (B, 1), on completions whose geometric mean ratio to the sampler is outside [low, high] (SkyRL).

    Over tokens whose log-probability the sampler reported.
    """
    difference_BT = logps_BT - sampling_logps_BT
    ratio_B1 = _sequence_mean(difference_BT.nan_to_num(nan=0.0), mask_BT * ~difference_BT.isnan()).exp()
    return (ratio_B1 < low) | (ratio_B1 > high)


@torch.no_grad()
def vespo_weight(cfg: LossConfig, batch: TokenBatch, log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """The gamma weight of each sequence in the VESPO loss, (B, 1), without gradient (TRL: `get_gamma_weights`)."""
    lowest = math.log(1e-8)
    log_w = (log_ratio_BT.clamp(-20.0, 20.0) * batch.mask_BT).sum(-1, keepdim=True)
    if batch.sampling_ratio is not None:
        log_w = log_w + batch.sampling_ratio.log().clamp(lowest, 20.0).sum(-1, keepdim=True)
    log_w = log_w.clamp(lowest, 20.0)
    positive = batch.advantages >= 0
    k = torch.where(positive, cfg.vespo_k_pos, cfg.vespo_k_neg)
    lam = torch.where(positive, cfg.vespo_lambda_pos, cfg.vespo_lambda_neg).clamp(min=1e-4)
    phi = torch.exp(lam + k * log_w - lam * log_w.exp())
    return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _bounded(
    cfg: LossConfig, batch: TokenBatch, log_ratio: torch.Tensor, factors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Bound log-ratios where the loss does not depend on them: their gradient is 0, which times infinity is NaN.

    There a loss is clipped or saturated, or one of the `factors` that it is multiplied by is zero. Elsewhere, and up to
    the bound, they stay as they are.
    """
    bounded = log_ratio.clamp(max=_LARGEST_LOG_RATIO)
    if cfg.beta != 0.0 and cfg.use_bias_correction_kl:  # the KL term grows with the ratio
        flat = batch.mask_BT == 0
    elif cfg.loss_type == "sapo" or cfg.delta is not None:
        return bounded
    else:
        flat = (batch.advantages >= 0) | (math.prod(factors, start=batch.mask_BT) == 0)
    if cfg.importance_sampling_level == "sequence":
        flat = flat.all(1, keepdim=True)
    return torch.where(flat, bounded, log_ratio)


def _surrogate(cfg: LossConfig, batch: TokenBatch, old: torch.Tensor, ratio: torch.Tensor) -> TokenLoss:
    """The loss of each token by its type, before masks, corrections and the KL term."""
    logps, advantages = batch.logps_BT, batch.advantages
    if cfg.loss_type in POLICY_LOSSES:
        return TokenLoss(registered_loss(cfg.loss_type, logps, old, advantages, batch.mask_BT), ratio)
    if cfg.loss_type == "cispo":
        return TokenLoss(-ratio.clamp(max=cfg.epsilon_high).detach() * advantages * logps, ratio)
    if cfg.loss_type == "sapo":
        temperature = torch.where(advantages > 0, cfg.sapo_temperature_pos, cfg.sapo_temperature_neg)
        return TokenLoss(-torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages, ratio)
    if cfg.loss_type == "vespo":
        phi = vespo_weight(cfg, batch, logps - old)
        return TokenLoss(-phi * advantages * logps, ratio, vespo_phi_B1=phi)
    if cfg.trust_region is not None and cfg.trust_region_threshold is not None:
        if batch.old_logps_BT is None and batch.sampling_logps_BT is not None:
            old = batch.sampling_logps_BT
        outside = outside_trust_region(cfg.trust_region, cfg.trust_region_threshold, logps, old, advantages)
        weights = ratio.detach().clamp(max=_LARGEST_RATIO) * torch.exp(logps - logps.detach())
        return TokenLoss(-weights * advantages * ~outside, ratio, outside_region_BT=outside)
    clipped = ratio.clamp(1 - cfg.epsilon_low, 1 + cfg.epsilon_high)
    bounded = ratio if cfg.delta is None else ratio.clamp(max=cfg.delta)
    return TokenLoss(-torch.min(bounded * advantages, clipped * advantages), bounded)


def distillation_advantages(logps_BT: torch.Tensor, teacher_BT: torch.Tensor, coefficient: float) -> torch.Tensor:
    """The advantage of each token in on-policy distillation, (B, T): minus its term of KL(student || teacher), in nats.

    Without gradient, and without a return over later tokens (Thinking Machines, "On-Policy Distillation", 2025).
    """
    return coefficient * (teacher_BT - logps_BT.detach())


def token_loss(cfg: LossConfig, batch: TokenBatch) -> TokenLoss:
    """The per-token policy loss with its KL term, before any weighting; (B, 1) where every factor is per sequence.

    Sources: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, CISPO 2506.13585, SAPO 2511.20347, LUSPO and
    VESPO as in TRL 1.16 `_compute_loss`, the mean ratio of a sequence GSPO 2507.18071.
    """
    logps, mask, advantages = batch.logps_BT, batch.mask_BT, batch.advantages
    old = logps.detach() if batch.old_logps_BT is None else batch.old_logps_BT
    sampling = old if batch.sampling_logps_BT is None else batch.sampling_logps_BT
    per_token = cfg.importance_sampling_level == "token"
    factors, outside = list[torch.Tensor](), None
    if cfg.off_policy_mask_threshold is not None:
        factors.append(off_policy_keep(advantages, logps, sampling, mask, cfg.off_policy_mask_threshold))
    if cfg.sequence_mask_low is not None or cfg.sequence_mask_high is not None:
        low, high = cfg.sequence_mask_low or 0.0, cfg.sequence_mask_high or math.inf
        outside = outside_sequence_bounds(logps, sampling, mask, low, high)
        factors.append(~outside)
    if batch.entropy_keep_BT is not None:
        factors.append(batch.entropy_keep_BT)
    if cfg.correct_sampling and cfg.loss_type != "vespo" and batch.sampling_ratio is not None:
        factors.append(batch.sampling_ratio)
    log_ratio = logps - old if per_token else _sequence_mean(logps - old, mask)
    if batch.old_logps_BT is not None and cfg.trust_region is None:  # which bounds the ratio itself; else it is one
        log_ratio = _bounded(cfg, batch, log_ratio, factors)
    ratio = torch.exp(log_ratio)
    if not per_token and cfg.teacher_kl_coef is not None:
        ratio = ratio.detach() * torch.exp(logps - logps.detach())  # each token its advantage (GSPO-token, 2507.18071)
    tokens = _surrogate(cfg, batch, old, ratio)
    loss = tokens.loss_BT
    for factor in factors:
        loss = loss * factor
    kl = None
    if cfg.beta != 0.0 and batch.ref_logps_BT is not None:
        # the k3 estimator of KL(policy || reference) per token (Schulman, "Approximating KL divergence", 2020)
        delta = batch.ref_logps_BT - logps
        kl = torch.exp(delta) - delta - 1
        kl = kl * ratio if cfg.use_bias_correction_kl else kl
        loss = loss + cfg.beta * kl
        kl = kl.detach()
    return replace(tokens, loss_BT=loss, ratio=tokens.ratio.detach(), kl_BT=kl, outside_bounds_B1=outside)


def token_weights(
    cfg: LossConfig, mask_BT: torch.Tensor, counts: StepCounts, groups_B: Sequence[int] = ()
) -> torch.Tensor:
    """The weight of each token in the loss of the step, (B, T), by the aggregation and the step's denominators.

    "token_mean" (DAPO), "sequence_mean" (GRPO), "sequence_sum" and "sequence_sum_norm" (Dr. GRPO: over
    `max_completion_length`) weight completions equally or by their tokens. "prompt_mean" is the mean over a group's
    tokens in the step, then over groups, so that a prompt with long answers counts like others.
    """
    mask, kind = mask_BT.float(), cfg.weighting
    completions, tokens = max(counts.completions, 1), max(counts.tokens, 1)
    if kind == "sequence_mean":
        return mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / completions
    if kind == "sequence_sum_norm":
        return mask / (completions * cfg.max_completion_length)
    if kind == "sequence_sum":
        return mask / completions
    if kind == "prompt_mean":
        tokens_B = torch.tensor([max(counts.group_tokens[group], 1) for group in groups_B], device=mask.device)
        return mask / tokens_B[:, None] / len(counts.group_tokens)
    follows_trl = cfg.aggregation is None and cfg.loss_type != "bnpo"  # TRL's bnpo counts tokens itself
    if counts.items is not None and follows_trl:
        return mask / max(counts.items, 1.0)
    return mask / tokens


def clip_indicators(cfg: LossConfig, tokens: TokenLoss, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """0/1, shaped like the ratio, under TRL's metric names; or what the trust region leaves out."""
    ratio = tokens.ratio
    if tokens.outside_region_BT is not None:
        return {"trust_region/left_out": tokens.outside_region_BT.float()}
    if cfg.loss_type == "cispo":
        return {"cispo_clip_ratio": ((ratio > cfg.epsilon_high) & (advantages > 0)).float()}
    if cfg.loss_type not in PPO_CLIPPED:
        return {}
    low = ((ratio < 1 - cfg.epsilon_low) & (advantages < 0)).float()
    high = ((ratio > 1 + cfg.epsilon_high) & (advantages > 0)).float()
    return {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/region": torch.maximum(low, high)}


def entropy_threshold(entropies_N: torch.Tensor, top_quantile: float, tolerance: float = 1e-5) -> float:
    """The entropy above which a token is in the top `top_quantile` of the step's loss tokens (arXiv 2506.01939).

    As `torch.quantile`, without its limit of 16 million entries. The first tokens of a group have the same entropy in
    exact arithmetic; `tolerance` (nats) keeps rounding from choosing between them.
    """
    if entropies_N.numel() == 0:
        return math.inf
    ordered = entropies_N.double().sort().values
    last = ordered.numel() - 1
    position = (1.0 - top_quantile) * last
    below = min(int(position), last)
    above = min(below + 1, last)
    value = ordered[below] + (ordered[above] - ordered[below]) * (position - below)
    return float(value) - tolerance


def adapted_entropy_coefficient(
    coefficient: float, entropy: float, target: float, delta: float, lowest: float, highest: float
) -> float:
    """The entropy bonus's factor for the next step (Skywork-OR1, arXiv 2505.22312): up by `delta` while the step's
    entropy (nats per token) is at or below the target, down otherwise, within bounds."""
    if entropy <= target:
        return min(coefficient + delta, highest)
    return max(coefficient - delta, lowest)
