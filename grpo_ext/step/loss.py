"""Assembles a micro-batch's part of the loss of the step from the terms of algorithms.losses, and logs them.

Differs from TRL's `_compute_loss`: no collective and no denominator of its own. Called for every micro-batch.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..algorithms.load_balancing import load_balancing_loss
from ..algorithms.losses import (
    LossConfig,
    TokenBatch,
    TokenLoss,
    clip_indicators,
    distillation_advantages,
    token_loss,
    token_weights,
)
from ..errors import ConfigError, ModelError
from ..forward.columns import SAMPLER_LOGPS, TEACHER_LOGPS
from ..forward.lm_head import LogProbs, RouterOutput
from .inputs import LENGTHS, LossInputs
from .statistics import loss_mask

_EXTREMES = {"clip_ratio/low": "clip_ratio/low_min", "clip_ratio/high": "clip_ratio/high_max"}  # over rows
# the sampler's and the trainer's rounding may drift apart along a completion: names, and positions from and below
_DEPTHS = (
    ("sampling/logp_difference/below_64", 0, 64),
    ("sampling/logp_difference/below_512", 64, 512),
    ("sampling/logp_difference/below_4096", 512, 4096),
    ("sampling/logp_difference/beyond", 4096, math.inf),
)


def active_tokens(mask: torch.Tensor, entropies: torch.Tensor, threshold: float | None) -> torch.Tensor:
    """The tokens that carry loss and whose entropy is at or above the threshold, in nats; None: all that carry loss."""
    return mask if threshold is None else mask * (entropies >= threshold)


def assemble_loss(cfg: LossConfig, micro_batch: LossInputs, scores: LogProbs) -> torch.Tensor:
    """The part of the loss that a micro-batch adds to the step, times the micro-batch's weight."""
    columns, step, metrics = micro_batch.columns, micro_batch.step, micro_batch.metrics
    if micro_batch.cut is not None:
        loss = micro_batch.cut.share(micro_batch.first_row, (scores.logps_S, scores.entropies_S))
        return _with_routers(cfg, loss, scores, micro_batch)
    if cfg.beta != 0.0 and "ref_per_token_logps" not in columns:
        raise ConfigError(
            f"beta={cfg.beta:g} asks for the KL term, but these completions have no reference log-probabilities, "
            "because beta was 0 when they were sampled; start with the beta that the run ends with, or any above 0."
        )
    logps_S, entropies_S = scores.logps_S, scores.entropies_S
    if step.record is not None:  # it asks for gradients of these, and FSDP begins a backward pass at the model's output
        logps_S = logps_S.view_as(logps_S)
    mask, threshold = loss_mask(columns), step.entropy_threshold
    active = active_tokens(mask, entropies_S, threshold)
    batch = TokenBatch(
        logps_S=logps_S,
        mask_S=mask,
        advantages=columns["advantages"],
        lengths_B=columns[LENGTHS],
        old_logps_S=columns.get("old_per_token_logps"),
        ref_logps_S=columns.get("ref_per_token_logps"),
        sampling_logps_S=columns.get("sampling_per_token_logps"),
        sampling_ratio=columns.get("importance_sampling_ratio"),
        entropy_keep_S=None if threshold is None else active.bool().float(),
    )
    if cfg.teacher_kl_coef is not None:
        batch.advantages = batch.spread(batch.advantages) + _of_teacher(cfg.teacher_kl_coef, columns, logps_S)
    tokens, weights_S = token_loss(cfg, batch), token_weights(cfg, batch, step.counts, micro_batch.groups)
    shares_S = tokens.loss_S * weights_S
    loss = shares_S.sum()
    if step.record is not None:
        step.record(cfg, micro_batch, batch, tokens, entropies_S, shares_S)
    if cfg.entropy_coefficient is not None:
        metrics.add_total("policy_loss", loss)
        bonus = (entropies_S * active).sum()
        metrics.add("bonus_entropy", bonus, active.sum())
        loss = loss - cfg.entropy_coefficient * bonus / max(step.counts.entropy_tokens, 1)
    _add_policy_metrics(cfg, tokens, batch, micro_batch, entropies_S)
    if SAMPLER_LOGPS in columns:
        _add_sampler_difference(batch, micro_batch)
    if cfg.log_ratios and batch.old_logps_S is not None:
        _add_ratios((logps_S - batch.old_logps_S).detach().exp(), mask, micro_batch)
    return _with_routers(cfg, loss, scores, micro_batch)


def _with_routers(cfg: LossConfig, loss: torch.Tensor, scores: LogProbs, micro_batch: LossInputs) -> torch.Tensor:
    """A micro-batch's loss with what its routers add."""
    if cfg.router_coefficient is not None:
        loss = loss + cfg.router_coefficient * _router_loss(cfg.router_coefficient, scores.router, micro_batch)
    if scores.routing is not None:
        micro_batch.metrics.add("routing/changed_share", *scores.routing.counts())
    return loss * micro_batch.part.weight


def _of_teacher(coefficient: float, columns: Mapping[str, Any], logps_S: torch.Tensor) -> torch.Tensor:
    """The teacher's advantages of the tokens."""
    if (teacher_S := columns.get(TEACHER_LOGPS)) is None:
        raise ConfigError(
            f"these completions have no {TEACHER_LOGPS}, which the teacher's advantages need; an override of "
            "_generate_and_score_completions, compute_loss or _compute_loss has to pass on what super() returns, or "
            "what it is given, under this name."
        )
    return distillation_advantages(logps_S, teacher_S, coefficient)


def _add_sampler_difference(batch: TokenBatch, micro_batch: LossInputs) -> None:
    """How far the sampler's log-probabilities lie from those that the trainer computes for the same policy."""
    sampler_S = micro_batch.columns[SAMPLER_LOGPS]
    policy_S = batch.logps_S.detach() if batch.old_logps_S is None else batch.old_logps_S
    known_S = batch.mask_S * ~sampler_S.isnan()
    difference_S = (policy_S - sampler_S.nan_to_num()).abs()
    metrics = micro_batch.metrics
    metrics.add_tokens({"sampling/logp_difference": difference_S}, known_S)
    begins_B1 = (batch.lengths_B.cumsum(0) - batch.lengths_B)[:, None]
    place_S = torch.arange(len(known_S), device=known_S.device) - batch.spread(begins_B1)
    for name, start, end in _DEPTHS:
        if not start or start < max(micro_batch.lengths):
            metrics.add_tokens({name: difference_S}, known_S * (place_S >= start) * (place_S < end))


def _add_ratios(ratio_S: torch.Tensor, mask_S: torch.Tensor, micro_batch: LossInputs) -> None:
    metrics = micro_batch.metrics
    metrics.add_tokens({"sampling/ratio_mean": ratio_S}, mask_S)
    unmasked = torch.where(mask_S.bool(), ratio_S, torch.nan)
    metrics.add_extreme("sampling/ratio_min", unmasked, lowest=True)
    metrics.add_extreme("sampling/ratio_max", unmasked)


def _router_loss(coefficient: float, router: RouterOutput | None, micro_batch: LossInputs) -> torch.Tensor:
    if router is None:
        raise ModelError(
            f"router_aux_loss_coef={coefficient:g} asks for the load-balancing loss, but the forward returned no "
            "router logits; set router_aux_loss_coef=0, or let your override of _get_per_token_logps_and_entropies "
            "pass on compute_aux_loss and the tensors that it is given, and return the aux_loss that super() returns."
        )
    step = micro_batch.step
    chosen, probs, rows = router.statistics()
    share, total = step.expert_share, step.router_rows
    if share is None:  # the batch is the whole step
        share, total = chosen / max(rows, 1), rows
    aux = load_balancing_loss(probs, share.to(probs), total)
    micro_batch.metrics.add_total("aux_loss", aux)
    return aux


def _add_policy_metrics(
    cfg: LossConfig, tokens: TokenLoss, batch: TokenBatch, micro_batch: LossInputs, entropies_S: torch.Tensor
) -> None:
    metrics, mask, of_tokens = micro_batch.metrics, batch.mask_S, {"entropy": entropies_S}
    if cfg.teacher_kl_coef is not None:
        of_tokens["teacher_kl"] = batch.logps_S.detach() - micro_batch.columns[TEACHER_LOGPS]
    if tokens.kl_S is not None:
        of_tokens["kl"] = tokens.kl_S
    if tokens.vespo_phi is not None and tokens.vespo_phi.dim() == 2:
        metrics.add_sequences("vespo/phi_seq_mean", tokens.vespo_phi)
    if tokens.outside_bounds_B1 is not None:
        metrics.add_sequences("sequence_mask/left_out", tokens.outside_bounds_B1)
    for name, clipped in clip_indicators(cfg, tokens, batch).items():
        mean_name = f"{name}_mean" if name.startswith("clip_ratio/") else name
        if clipped.dim() == 2:
            metrics.add_sequences(mean_name, clipped)
        else:
            of_tokens[mean_name] = clipped
        if name in _EXTREMES:
            per_row = clipped if clipped.dim() == 2 else batch.sums(clipped * mask) / batch.sums(mask)
            metrics.add_extreme(_EXTREMES[name], per_row, lowest=name == "clip_ratio/low")
    metrics.add_tokens(of_tokens, mask)
