"""Step-wide statistics: the counts that losses are divided by, the entropy threshold and the experts' shares.

The entropy quantile and the MoE load-balancing loss are not sums over tokens. They become sums once the threshold and
the expert shares of the step are known, so these are measured first, in one pass without gradients per attempt.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..algorithms.losses import StepCounts, entropy_threshold
from ..batching.micro_batches import MicroBatch
from ..errors import PrecisionError
from ..rollouts.batch import RolloutBatch
from ..runtime.collectives import ragged_gather, sum_over_processes
from .metrics import StepMetrics


@dataclass
class StepContext:
    counts: StepCounts
    metrics: StepMetrics
    entropy_threshold: float | None = None  # of the tokens at the step's quantile, in nats
    expert_share: torch.Tensor | None = None  # how often each expert is chosen per row (a token in a layer), (E,)
    router_rows: float = 0  # tokens times layers, over all processes
    top_k: int = 1  # experts per token


def loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """1 on the completion tokens that carry loss, (B, T): real, and written by the model."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def step_counts(tokens_B: Sequence[int], groups_B: Sequence[int]) -> StepCounts:
    by_group = dict.fromkeys(groups_B, 0)
    for group, tokens in zip(groups_B, tokens_B, strict=True):
        by_group[group] += tokens
    return StepCounts(len(tokens_B), sum(tokens_B), sum(tokens_B), by_group)


@dataclass(frozen=True)
class MicroBatchStatistics:
    """Measured in a pass without gradients."""

    part: MicroBatch
    entropies_BT: torch.Tensor
    mask_BT: torch.Tensor  # 1 on tokens that carry loss
    experts: tuple[torch.Tensor, torch.Tensor, int] | None = None  # of `router_statistics`


def count_step(rollout: RolloutBatch, metrics: StepMetrics, top_k: int = 1) -> StepContext:
    """Every process holds the whole step, so the counts need no collective."""
    counts = step_counts([int(mask.sum()) for mask in rollout.loss_masks], rollout.groups)
    if rollout.items_per_token is not None:
        counts = replace(counts, items=counts.tokens * rollout.items_per_token)
    return StepContext(counts, metrics, top_k=top_k)


def set_statistics(context: StepContext, measured: Sequence[MicroBatchStatistics], top_entropy_quantile: float) -> None:
    """All processes together."""
    if top_entropy_quantile < 1.0:
        local = [m.entropies_BT[m.mask_BT.bool()].float() for m in measured if m.part.weight]
        everyone = ragged_gather(torch.cat(local) if local else measured[0].entropies_BT.new_empty(0).float())
        if unknown := int(everyone.isnan().sum()):
            raise PrecisionError(
                f"top_entropy_quantile={top_entropy_quantile:g} compares the entropies of a step, and {unknown} of "
                f"{everyone.numel()} are NaN; look for logits that are NaN or inf, or set top_entropy_quantile=1."
            )
        context.entropy_threshold = threshold = entropy_threshold(everyone, top_entropy_quantile)
        tokens = int((everyone >= threshold).sum())
        context.counts = replace(context.counts, entropy_tokens=tokens)
    experts = [(m.part.weight, m.experts) for m in measured if m.experts is not None]
    if experts:
        chosen = functools.reduce(torch.add, (chosen * weight for weight, (chosen, _, _) in experts))
        rows = sum(rows for weight, (_, _, rows) in experts if weight)
        totals = sum_over_processes(torch.cat([chosen, chosen.new_tensor([float(rows)])]))
        context.router_rows = int(totals[-1])
        context.expert_share = totals[:-1] / max(context.router_rows, 1)
