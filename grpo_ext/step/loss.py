"""Assembles a micro-batch's part of the loss of the step from the terms of algorithms.losses, and logs them.

Differs from TRL's `_compute_loss`: no collective and no denominator of its own. Called for every micro-batch.
"""

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
from ..forward.lm_head import RouterOutput
from ..forward.runner import MicroBatchScores
from .inputs import LossInputs
from .statistics import loss_mask

# the sampler's and the trainer's rounding may drift apart along a completion: names, and positions from and below
_DEPTHS = (
    ("sampling/logp_difference/below_64", 0, 64),
    ("sampling/logp_difference/below_512", 64, 512),
    ("sampling/logp_difference/below_4096", 512, 4096),
    ("sampling/logp_difference/beyond", 4096, None),
)


def active_tokens(mask_BT: torch.Tensor, entropies_BT: torch.Tensor, threshold: float | None) -> torch.Tensor:
    """The tokens that carry loss and whose entropy is at or above the threshold, in nats; None: all that carry loss."""
    return mask_BT if threshold is None else mask_BT * (entropies_BT >= threshold)


def assemble_loss(cfg: LossConfig, micro_batch: LossInputs, scores: MicroBatchScores) -> torch.Tensor:
    """The part of the loss that a micro-batch adds to the step, times the micro-batch's weight."""
    columns, step, weight = micro_batch.columns, micro_batch.step, micro_batch.part.weight
    if cfg.beta != 0.0 and "ref_per_token_logps" not in columns:
        raise ConfigError(
            f"beta={cfg.beta:g} asks for the KL term, but these completions have no reference log-probabilities, "
            "because beta was 0 when they were sampled; start with the beta that the run ends with, or any above 0."
        )
    logps, entropies, router, routing = scores
    mask, threshold, metrics = loss_mask(columns), step.entropy_threshold, step.metrics
    active = active_tokens(mask, entropies, threshold)
    batch = TokenBatch(
        logps_BT=logps,
        mask_BT=mask,
        advantages_B=_advantages(cfg, columns, logps),
        old_logps_BT=columns.get("old_per_token_logps"),
        ref_logps_BT=columns.get("ref_per_token_logps"),
        sampling_logps_BT=columns.get("sampling_per_token_logps"),
        sampling_ratio=columns.get("importance_sampling_ratio"),
        entropy_keep_BT=None if threshold is None else active.bool().float(),
    )
    tokens, weights_BT = token_loss(cfg, batch), token_weights(cfg, mask, step.counts, micro_batch.groups)
    loss = (tokens.loss_BT * weights_BT).sum()
    if step.record is not None:
        step.record(cfg, micro_batch, batch, tokens, entropy=entropies, share=tokens.loss_BT * weights_BT)
    if cfg.entropy_coefficient is not None:
        metrics.add_total("policy_loss", loss, weight)
        bonus = (entropies * active).sum()
        metrics.add("bonus_entropy", bonus, active.sum(), weight)
        loss = loss - cfg.entropy_coefficient * bonus / max(step.counts.entropy_tokens, 1)
    if cfg.router_coefficient is not None:
        loss = loss + cfg.router_coefficient * _router_loss(cfg.router_coefficient, router, micro_batch)
    metrics.add_tokens("entropy", entropies, mask, weight)
    _add_policy_metrics(cfg, tokens, batch, micro_batch)
    if (sampler_logps_BT := columns.get(SAMPLER_LOGPS)) is not None:
        _add_sampler_difference(batch, sampler_logps_BT, micro_batch)
    if routing is not None:
        metrics.add("routing/changed_share", *routing.counts(), weight)
    if cfg.log_ratios and batch.old_logps_BT is not None:
        _add_ratios((logps - batch.old_logps_BT).detach().exp(), mask, micro_batch)
    return loss * weight


def _advantages(cfg: LossConfig, columns: Mapping[str, Any], logps_BT: torch.Tensor) -> torch.Tensor:
    """The advantages of the rollout batch; with a teacher one for each token, (B, T)."""
    advantages, teacher_BT = columns["advantages"], columns.get(TEACHER_LOGPS)
    if cfg.teacher_kl_coef is None:
        return advantages
    if teacher_BT is None:
        raise ConfigError(
            f"these completions have no {TEACHER_LOGPS}, which the teacher's advantages need; an override of "
            "_generate_and_score_completions, compute_loss or _compute_loss has to pass on what super() returns, or "
            "what it is given, under this name."
        )
    per_token = advantages[:, None] if advantages.dim() == 1 else advantages
    return per_token + distillation_advantages(logps_BT, teacher_BT, cfg.teacher_kl_coef)


def _add_sampler_difference(batch: TokenBatch, sampler_logps_BT: torch.Tensor, micro_batch: LossInputs) -> None:
    """How far the sampler's log-probabilities lie from those that the trainer computes for the same policy."""
    policy_BT = batch.logps_BT.detach() if batch.old_logps_BT is None else batch.old_logps_BT
    known_BT = batch.mask_BT * ~sampler_logps_BT.isnan()
    difference_BT = (policy_BT - sampler_logps_BT.nan_to_num()).abs()
    metrics, weight = micro_batch.step.metrics, micro_batch.part.weight
    metrics.add_tokens("sampling/logp_difference", difference_BT, known_BT, weight)
    for name, start, end in _DEPTHS:
        if start < known_BT.size(1):
            metrics.add_tokens(name, difference_BT[:, start:end], known_BT[:, start:end], weight)


def _add_ratios(ratio_BT: torch.Tensor, mask_BT: torch.Tensor, micro_batch: LossInputs) -> None:
    metrics, weight = micro_batch.step.metrics, micro_batch.part.weight
    metrics.add_tokens("sampling/ratio_mean", ratio_BT, mask_BT, weight)
    unmasked = torch.where(mask_BT.bool(), ratio_BT, torch.nan)
    metrics.add_extreme("sampling/ratio_min", unmasked, weight, lowest=True)
    metrics.add_extreme("sampling/ratio_max", unmasked, weight)


def _router_loss(coefficient: float, router: RouterOutput | None, micro_batch: LossInputs) -> torch.Tensor:
    if router is None:
        raise ModelError(
            f"router_aux_loss_coef={coefficient:g} asks for the load-balancing loss, but the forward returned no "
            "router logits; set router_aux_loss_coef=0, or let your override of _get_per_token_logps_and_entropies "
            "pass on compute_aux_loss and the tensors that it is given, and return the aux_loss that super() returns."
        )
    step = micro_batch.step
    chosen, probs, rows = router.statistics(step.top_k)
    share, total = step.expert_share, step.router_rows
    if share is None:  # the batch is the whole step
        share, total = chosen / max(rows, 1), rows
    aux = load_balancing_loss(probs, share.to(probs), total)
    step.metrics.add_total("aux_loss", aux, micro_batch.part.weight)
    return aux


def _add_policy_metrics(cfg: LossConfig, tokens: TokenLoss, batch: TokenBatch, micro_batch: LossInputs) -> None:
    metrics, weight, mask = micro_batch.step.metrics, micro_batch.part.weight, batch.mask_BT
    if cfg.teacher_kl_coef is not None:
        metrics.add_tokens("teacher_kl", batch.logps_BT.detach() - micro_batch.columns[TEACHER_LOGPS], mask, weight)
    if tokens.kl_BT is not None:
        metrics.add_tokens("kl", tokens.kl_BT, mask, weight)
    whole = batch.advantages_B.dim() == 1  # else the tokens of a completion have advantages of their own
    if tokens.vespo_phi_B1 is not None and whole:
        metrics.add_sequences("vespo/phi_seq_mean", tokens.vespo_phi_B1, weight)
    if tokens.outside_bounds_B1 is not None:
        metrics.add_sequences("sequence_mask/left_out", tokens.outside_bounds_B1, weight)
    per_sequence = cfg.importance_sampling_level == "sequence" and whole
    for name, clipped in clip_indicators(cfg, tokens, batch.advantages).items():
        mean_name = f"{name}_mean" if name.startswith("clip_ratio/") else name
        if per_sequence:
            metrics.add_sequences(mean_name, clipped, weight)
        else:
            metrics.add_tokens(mean_name, clipped, mask, weight)
        per_row = clipped.squeeze(1) if per_sequence else (clipped * mask).sum(-1) / mask.sum(-1)
        if name == "clip_ratio/low":
            metrics.add_extreme("clip_ratio/low_min", per_row, weight, lowest=True)
        elif name == "clip_ratio/high":
            metrics.add_extreme("clip_ratio/high_max", per_row, weight)
