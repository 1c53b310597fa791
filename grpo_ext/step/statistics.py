"""Step-wide statistics: the counts every loss is divided by, and what two terms need to know of the whole step.

The entropy quantile and the MoE load-balancing loss are no sums over tokens; with their step-wide threshold and expert
shares measured first (one pass without gradients), they are. Runs once per optimizer step, before its first backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..algorithms.losses import StepCounts, entropy_threshold, load_balancing_loss, router_statistics
from ..batching.sizes import group_numbers
from ..forward.lm_head import RouterOutput
from ..forward.rows import TokenRows, Unchanged
from ..rollouts.batch import RolloutBatch
from ..runtime.collectives import ragged_gather, sum_over_processes
from .metrics import StepMetrics
from .plan import MicroBatch


@dataclass
class StepContext:
    """What a micro-batch has to know about its step.

    Attributes:
        counts: the denominators.
        metrics: collects what is logged.
        entropy_keep: for the rows of this process, which tokens are above the step's entropy quantile.
        expert_share: how often each expert is chosen per row (a token in a layer), (E,); None without a router.
        router_rows: rows of the step: tokens times layers, over all processes.
        top_k: experts per token.
    """

    counts: StepCounts
    metrics: StepMetrics
    entropy_keep: dict[int, torch.Tensor] | None = None
    expert_share: torch.Tensor | None = None
    router_rows: int = 0
    top_k: int = 1

    def keep_mask(self, rows: Sequence[int], width: int, device: torch.device) -> torch.Tensor:
        """`entropy_keep` of some rows as one (B, width) tensor of 0 and 1."""
        mask = torch.zeros(len(rows), width, device=device)
        for i, row in enumerate(rows):
            kept = (self.entropy_keep or {})[row]
            mask[i, : kept.numel()] = kept[:width].float()
        return mask


STEP_PART = "grpo_ext_step"
TOKENS = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")  # of TRL's dictionary


@dataclass(frozen=True)
class StepPart:
    """What the loss of a micro-batch has to know of its step.

    It stands under `STEP_PART` in the dictionary that TRL's `compute_loss` and `_compute_loss` are given, so that it
    goes through a user's overrides of them, copies of the dictionary included.

    Attributes:
        context: the step.
        weight: 0 where a process runs the micro-batch only to keep the collectives aligned.
        groups: which group of the step each completion belongs to.
        rows: the tokens that the dictionary holds padded.
        padded: those tensors, by which a change of theirs is noticed.
        entropy_keep_BT: 1 on the tokens above the step's entropy quantile; None without a quantile.
    """

    context: StepContext
    weight: float
    groups: Sequence[int]
    rows: TokenRows
    padded: Unchanged
    entropy_keep_BT: torch.Tensor | None = None

    def rows_of(self, inputs: Mapping[str, Any]) -> TokenRows | None:
        """The tokens that a dictionary holds padded; None where a user's override has put others there."""
        return self.rows if self.padded.are(*(inputs[name] for name in TOKENS)) else None


def _counts(tokens_B: Sequence[int], groups_B: Sequence[int]) -> StepCounts:
    by_group = dict.fromkeys(groups_B, 0)
    for group, tokens in zip(groups_B, tokens_B):
        by_group[group] += tokens
    return StepCounts(len(tokens_B), sum(tokens_B), sum(tokens_B), by_group)


Score = Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor, RouterOutput | None]]


def measure_step(
    rollout: RolloutBatch,
    micro_batches: Sequence[MicroBatch],
    score: Score,
    metrics: StepMetrics,
    top_entropy_quantile: float,
    has_router: bool,
    top_k: int,
    guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> StepContext:
    """Count the step and, where a term asks for it, run the statistics pass.

    Every process holds the whole step, so the counts need no collective.

    Args:
        score: for a micro-batch, without gradients: entropies (B, T), loss mask (B, T), router output.
        guard: around the forwards of the pass, which hold no collective.
    """
    tokens = [int(mask.sum()) for mask in rollout.loss_masks]
    counts = _counts(tokens, rollout.groups)
    if rollout.items_per_token is not None:
        counts = replace(counts, items=counts.tokens * rollout.items_per_token)
    context = StepContext(counts, metrics, top_k=top_k)
    if top_entropy_quantile >= 1.0 and not has_router:
        return context
    entropies: dict[int, torch.Tensor] = {}
    masks: dict[int, torch.Tensor] = {}
    chosen: torch.Tensor | None = None
    rows = 0
    with guard():
        for part in micro_batches:
            entropies_BT, mask_BT, router = score(part)
            entropies |= dict(zip(part.rows, entropies_BT))
            masks |= dict(zip(part.rows, mask_BT))
            if router is not None:
                counted, _, here = router_statistics(router.logits, router.counts_BL, top_k)
                weighted = counted * part.weight
                chosen = weighted if chosen is None else chosen + weighted
                rows += here if part.weight else 0
    real = [row for part in micro_batches if part.weight for row in part.rows]
    if top_entropy_quantile < 1.0:
        _set_entropy_keep(context, entropies, masks, real, top_entropy_quantile)
    if chosen is not None:
        totals = sum_over_processes(torch.cat([chosen, chosen.new_tensor([float(rows)])]))
        context.router_rows = int(totals[-1])
        context.expert_share = totals[:-1] / max(context.router_rows, 1)
    return context


def _set_entropy_keep(
    context: StepContext,
    entropies: dict[int, torch.Tensor],
    masks: dict[int, torch.Tensor],
    real: list[int],
    top_entropy_quantile: float,
) -> None:
    some = next(iter(entropies.values()))
    local = [entropies[row][masks[row].bool()].float() for row in real]
    everyone = ragged_gather(torch.cat(local) if local else some[:0].float())
    threshold = entropy_threshold(everyone, top_entropy_quantile)
    context.entropy_keep = {row: (entropies[row] >= threshold) & masks[row].bool() for row in entropies}
    kept = int((everyone >= threshold).sum()) if math.isfinite(threshold) else 0
    context.counts = replace(context.counts, entropy_tokens=kept)


def router_term(router: RouterOutput, context: StepContext) -> torch.Tensor:
    """A micro-batch's part of the load-balancing loss of the step, with gradient."""
    chosen, probs, rows = router_statistics(router.logits, router.counts_BL, context.top_k)
    share, total = context.expert_share, context.router_rows
    if share is None:  # the batch is the whole step
        share, total = chosen / max(rows, 1), rows
    return load_balancing_loss(probs, share.to(probs), probs.numel(), total)


def whole_step(
    inputs: dict[str, Any],
    rows: TokenRows,
    device: torch.device,
    top_k: int,
    num_generations: int,
    top_entropy_quantile: float,
    entropies_of: Callable[[dict[str, Any], TokenRows], torch.Tensor],
) -> dict[str, Any]:
    """A scored batch that is no part of a step (a user's own call), with itself as its step.

    Args:
        inputs: as TRL scored it; it begins with a whole group.
        rows: its tokens.
        entropies_of: from both to entropies (B, T), without gradients; called where a quantile is set.
    """
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    groups = group_numbers(mask.size(0), num_generations)
    context = StepContext(_counts(mask.sum(1).tolist(), groups), StepMetrics(device), top_k=top_k)
    keep = None
    if top_entropy_quantile < 1.0:
        entropies, numbers = entropies_of(inputs, rows), list(range(mask.size(0)))
        by_row = dict(zip(numbers, entropies)), dict(zip(numbers, mask))
        _set_entropy_keep(context, *by_row, numbers, top_entropy_quantile)
        keep = context.keep_mask(numbers, mask.size(1), entropies.device)
    padded = Unchanged(*(inputs[name] for name in TOKENS))
    return {**inputs, STEP_PART: StepPart(context, 1.0, groups, rows, padded, keep)}
