"""Per-token losses of the GRPO family, and the weights that turn them into one sum per optimizer step.

Differs from TRL's `GRPOTrainer._compute_loss` in one point: no denominator is computed here. The loss of a step is
`sum(weights * per_token_loss)` with weights fixed by step-wide counts, so any partition of the step adds up to it.
Called by step.loss for every micro-batch. Shapes: B completions, (B, 1) per sequence, S completion tokens of all, one
completion after the other, without padding. Values without a suffix have one or the other shape.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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


class _Spread(torch.autograd.Function):
    """Values of rows, (B, 1), for each of their tokens, (S,); its gradient sums rows as `row_sums` does."""

    @staticmethod
    def forward(ctx: Any, values_B1: torch.Tensor, lengths_B: torch.Tensor, tokens: int) -> torch.Tensor:
        ctx.lengths_B = lengths_B
        return values_B1[:, 0].repeat_interleave(lengths_B, output_size=tokens)

    @staticmethod
    def backward(ctx: Any, gradient_S: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return row_sums(gradient_S, ctx.lengths_B), None, None


def row_sums(values_S: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """The sum over the tokens of each row, (B, 1), whose bits do not depend on other rows; 0 for a row without any."""
    if values_S.device.type == "mps":  # which has no float64
        return row_sums(values_S.cpu(), lengths_B.cpu()).to(values_S.device)
    # over (S, 1) each row is one loop; over (S,) the order on CUDA depends on where a long row begins in memory
    sums_B1 = torch.segment_reduce(values_S.double()[:, None], "sum", lengths=lengths_B, unsafe=True)
    return sums_B1.to(values_S.dtype)


@dataclass
class TokenBatch:
    logps_S: torch.Tensor  # with the gradient
    mask_S: torch.Tensor
    advantages: torch.Tensor
    lengths_B: torch.Tensor  # tokens of each row, int64; a row may have none
    old_logps_S: torch.Tensor | None = None  # None on-policy: the ratio is one, with the policy's gradient
    ref_logps_S: torch.Tensor | None = None
    sampling_logps_S: torch.Tensor | None = None  # of an inference engine
    sampling_ratio: torch.Tensor | None = None
    entropy_keep_S: torch.Tensor | None = None  # 1 on tokens above the entropy quantile

    def sums(self, values_S: torch.Tensor) -> torch.Tensor:
        return row_sums(values_S, self.lengths_B)

    def means(self, values_S: torch.Tensor, mask_S: torch.Tensor) -> torch.Tensor:
        return self.sums(values_S * mask_S) / self.sums(mask_S).clamp(min=1.0)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values of rows for each token, (S,); values of tokens as they are."""
        return values if values.dim() == 1 else _Spread.apply(values, self.lengths_B, len(self.mask_S))


@dataclass
class TokenLoss:
    loss_S: torch.Tensor
    ratio: torch.Tensor
    kl_S: torch.Tensor | None = None
    vespo_phi: torch.Tensor | None = None
    outside_region_S: torch.Tensor | None = None  # True on tokens that the trust region leaves out
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


def off_policy_keep(batch: TokenBatch, sampling_logps_S: torch.Tensor, threshold: float) -> torch.Tensor:
    """1.0 for sequences to keep, (S,): non-negative advantage or mean KL below `threshold` (DeepSeek-V3.2, eq. 9)."""
    kl_S = torch.nan_to_num(sampling_logps_S - batch.logps_S.detach(), nan=0.0)
    near_S = batch.spread(batch.means(kl_S, batch.mask_S) <= threshold)
    return (near_S | (batch.spread(batch.advantages) >= 0)).to(kl_S.dtype)


@torch.no_grad()
def outside_trust_region(
    kind: str, threshold: float, logps_S: torch.Tensor, old_logps_S: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """True, (S,), on tokens that moved beyond the threshold the way their advantage points (DPPO, arXiv 2602.04879).

    The distance is that of two outcomes, the token or another one: Binary-TV, a difference of probabilities, or
    Binary-KL of the old policy to the new, in nats. A token whose old log-probability is NaN is inside.
    """
    new_S, old_S = logps_S.exp(), old_logps_S.exp()
    distance_S = (new_S - old_S).abs()
    if kind == "kl":
        # the probability of another token, which near zero would be lost in 1 - exp(...)
        other_new_S, other_old_S = (-torch.expm1(logps).clamp(max=-1e-8) for logps in (logps_S, old_logps_S))
        distance_S = old_S * (old_logps_S - logps_S) + other_old_S * (other_old_S / other_new_S).log()
    return ((new_S - old_S) * advantages > 0) & (distance_S > threshold)


@torch.no_grad()
def outside_sequence_bounds(batch: TokenBatch, sampling_logps_S: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """True, (B, 1), on completions whose geometric mean ratio to the sampler is outside [low, high] (SkyRL).

    Over tokens whose log-probability the sampler reported.
    """
    difference_S = batch.logps_S - sampling_logps_S
    ratio_B1 = batch.means(difference_S.nan_to_num(nan=0.0), batch.mask_S * ~difference_S.isnan()).exp()
    return (ratio_B1 < low) | (ratio_B1 > high)


@torch.no_grad()
def vespo_weight(cfg: LossConfig, batch: TokenBatch, log_ratio_S: torch.Tensor) -> torch.Tensor:
    """The gamma weight of each sequence in the VESPO loss, without gradient (TRL: `get_gamma_weights`).

    (B, 1), or (S,) where tokens have advantages of their own.
    """
    lowest, advantages = math.log(1e-8), batch.advantages
    log_w = batch.sums(log_ratio_S.clamp(-20.0, 20.0) * batch.mask_S)
    if batch.sampling_ratio is not None:
        logs = batch.sampling_ratio.log().clamp(lowest, 20.0)
        log_w = log_w + (batch.sums(logs) if logs.dim() == 1 else logs)
    log_w = log_w.clamp(lowest, 20.0)
    log_w = batch.spread(log_w) if advantages.dim() == 1 else log_w
    k = torch.where(advantages >= 0, cfg.vespo_k_pos, cfg.vespo_k_neg)
    lam = torch.where(advantages >= 0, cfg.vespo_lambda_pos, cfg.vespo_lambda_neg).clamp(min=1e-4)
    phi = torch.exp(lam + k * log_w - lam * log_w.exp())
    return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _bounded(
    cfg: LossConfig, batch: TokenBatch, log_ratio: torch.Tensor, factors_S: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Bound log-ratios where the loss does not depend on them: their gradient is 0, which times infinity is NaN.

    There a loss is clipped or saturated, or one of the `factors_S` that it is multiplied by is zero. Elsewhere, and up
    to the bound, they stay as they are.
    """
    bounded = log_ratio.clamp(max=_LARGEST_LOG_RATIO)
    if cfg.beta != 0.0 and cfg.use_bias_correction_kl:  # the KL term grows with the ratio
        flat_S = batch.mask_S == 0
    elif cfg.loss_type == "sapo" or cfg.delta is not None:
        return bounded
    else:
        flat_S = (batch.spread(batch.advantages) >= 0) | (math.prod(factors_S, start=batch.mask_S) == 0)
    flat = flat_S if log_ratio.dim() == 1 else batch.sums((~flat_S).float()) == 0
    return torch.where(flat, bounded, log_ratio)


def _surrogate(cfg: LossConfig, batch: TokenBatch, old: torch.Tensor, ratio: torch.Tensor) -> TokenLoss:
    """The loss of each token by its type, before masks, corrections and the KL term."""
    logps, advantages, ratio_S = batch.logps_S, batch.spread(batch.advantages), batch.spread(ratio)
    if cfg.loss_type in POLICY_LOSSES:
        given = batch.lengths_B.tolist(), logps, old, batch.advantages, batch.mask_S
        return TokenLoss(registered_loss(cfg.loss_type, *given), ratio)
    if cfg.loss_type == "cispo":
        return TokenLoss(-ratio_S.clamp(max=cfg.epsilon_high).detach() * advantages * logps, ratio)
    if cfg.loss_type == "sapo":
        temperature = torch.where(advantages > 0, cfg.sapo_temperature_pos, cfg.sapo_temperature_neg)
        return TokenLoss(-torch.sigmoid(temperature * (ratio_S - 1)) * 4 / temperature * advantages, ratio)
    if cfg.loss_type == "vespo":
        phi = vespo_weight(cfg, batch, logps - old)
        return TokenLoss(-batch.spread(phi) * advantages * logps, ratio, vespo_phi=phi)
    if cfg.trust_region is not None and cfg.trust_region_threshold is not None:
        if batch.old_logps_S is None and batch.sampling_logps_S is not None:
            old = batch.sampling_logps_S
        outside = outside_trust_region(cfg.trust_region, cfg.trust_region_threshold, logps, old, advantages)
        weights = ratio_S.detach().clamp(max=_LARGEST_RATIO) * torch.exp(logps - logps.detach())
        return TokenLoss(-weights * advantages * ~outside, ratio, outside_region_S=outside)
    clipped = ratio_S.clamp(1 - cfg.epsilon_low, 1 + cfg.epsilon_high)
    bounded = ratio if cfg.delta is None else ratio.clamp(max=cfg.delta)
    return TokenLoss(-torch.min(batch.spread(bounded) * advantages, clipped * advantages), bounded)


def distillation_advantages(logps_S: torch.Tensor, teacher_S: torch.Tensor, coefficient: float) -> torch.Tensor:
    """The advantage of each token in on-policy distillation, (S,): minus its term of KL(student || teacher), in nats.

    Without gradient, and without a return over later tokens (Thinking Machines, "On-Policy Distillation", 2025).
    """
    return coefficient * (teacher_S - logps_S.detach())


def token_loss(cfg: LossConfig, batch: TokenBatch) -> TokenLoss:
    """The per-token policy loss with its KL term, before any weighting.

    Sources: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, CISPO 2506.13585, SAPO 2511.20347, LUSPO and
    VESPO as in TRL 1.16 `_compute_loss`, the mean ratio of a sequence GSPO 2507.18071.
    """
    logps = batch.logps_S
    old = logps.detach() if batch.old_logps_S is None else batch.old_logps_S
    sampling = old if batch.sampling_logps_S is None else batch.sampling_logps_S
    per_token = cfg.importance_sampling_level == "token"
    factors, outside = list[torch.Tensor](), None
    if cfg.off_policy_mask_threshold is not None:
        factors.append(off_policy_keep(batch, sampling, cfg.off_policy_mask_threshold))
    if cfg.sequence_mask_low is not None or cfg.sequence_mask_high is not None:
        low, high = cfg.sequence_mask_low or 0.0, cfg.sequence_mask_high or math.inf
        outside = outside_sequence_bounds(batch, sampling, low, high)
        factors.append(batch.spread(~outside))
    if batch.entropy_keep_S is not None:
        factors.append(batch.entropy_keep_S)
    if cfg.correct_sampling and cfg.loss_type != "vespo" and batch.sampling_ratio is not None:
        factors.append(batch.spread(batch.sampling_ratio))
    log_ratio = logps - old if per_token else batch.means(logps - old, batch.mask_S)
    if batch.old_logps_S is not None and cfg.trust_region is None:  # which bounds the ratio itself; else it is one
        log_ratio = _bounded(cfg, batch, log_ratio, factors)
    ratio = torch.exp(log_ratio)
    if not per_token and cfg.teacher_kl_coef is not None:
        # each token its advantage (GSPO-token, 2507.18071)
        ratio = batch.spread(ratio.detach()) * torch.exp(logps - logps.detach())
    tokens = _surrogate(cfg, batch, old, ratio)
    loss = tokens.loss_S
    for factor in factors:
        loss = loss * factor
    kl = None
    if cfg.beta != 0.0 and batch.ref_logps_S is not None:
        # the k3 estimator of KL(policy || reference) per token (Schulman, "Approximating KL divergence", 2020)
        delta = batch.ref_logps_S - logps
        kl = torch.exp(delta) - delta - 1
        kl = kl * batch.spread(ratio) if cfg.use_bias_correction_kl else kl
        loss = loss + cfg.beta * kl
        kl = kl.detach()
    return replace(tokens, loss_S=loss, ratio=tokens.ratio.detach(), kl_S=kl, outside_bounds_B1=outside)


def token_weights(cfg: LossConfig, batch: TokenBatch, counts: StepCounts, groups_B: Sequence[int] = ()) -> torch.Tensor:
    """The weight of each token in the loss of the step, (S,), by the aggregation and the step's denominators.

    "token_mean" (DAPO), "sequence_mean" (GRPO), "sequence_sum" and "sequence_sum_norm" (Dr. GRPO: over
    `max_completion_length`) weight completions equally or by their tokens. "prompt_mean" is the mean over a group's
    tokens in the step, then over groups, so that a prompt with long answers counts like others.
    """
    mask, kind = batch.mask_S.float(), cfg.weighting
    completions, tokens = max(counts.completions, 1), max(counts.tokens, 1)
    if kind == "sequence_mean":
        return mask / batch.spread(batch.sums(mask)).clamp(min=1.0) / completions
    if kind == "sequence_sum_norm":
        return mask / (completions * cfg.max_completion_length)
    if kind == "sequence_sum":
        return mask / completions
    if kind == "prompt_mean":
        tokens_B1 = torch.tensor([[max(counts.group_tokens[group], 1)] for group in groups_B], device=mask.device)
        return mask / batch.spread(tokens_B1) / len(counts.group_tokens)
    follows_trl = cfg.aggregation is None and cfg.loss_type != "bnpo"  # TRL's bnpo counts tokens itself
    if counts.items is not None and follows_trl:
        return mask / max(counts.items, 1.0)
    return mask / tokens


def clip_indicators(cfg: LossConfig, tokens: TokenLoss, batch: TokenBatch) -> dict[str, torch.Tensor]:
    """0/1 under TRL's metric names, or what the trust region leaves out; (B, 1) where ratio and advantage are."""
    ratio, advantages = tokens.ratio, batch.advantages
    if ratio.dim() != advantages.dim():
        ratio, advantages = batch.spread(ratio), batch.spread(advantages)
    if tokens.outside_region_S is not None:
        return {"trust_region/left_out": tokens.outside_region_S.float()}
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
    position = (1.0 - top_quantile) * (len(ordered) - 1)
    value = torch.lerp(ordered[math.floor(position)], ordered[math.ceil(position)], position % 1.0)
    return float(value) - tolerance


def adapted_entropy_coefficient(
    coefficient: float, entropy: float, target: float, delta: float, lowest: float, highest: float
) -> float:
    """The entropy bonus's factor for the next step (Skywork-OR1, arXiv 2505.22312): up by `delta` while the step's
    entropy (nats per token) is at or below the target, down otherwise, within bounds."""
    if entropy <= target:
        return min(coefficient + delta, highest)
    return max(coefficient - delta, lowest)
