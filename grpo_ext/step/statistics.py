"""Step-wide statistics: the counts every loss is divided by, the entropy threshold and the experts' shares.

The entropy quantile and the MoE load-balancing loss are not sums over tokens; with their step-wide threshold and expert
shares measured first (one pass without gradients), they are. Both are measured once per attempt.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..algorithms.losses import StepCounts, entropy_threshold
from ..batching.micro_batches import MicroBatch
from ..errors import ConfigError, PrecisionError
from ..forward.rows import TokenRows, Unchanged
from ..rollouts.batch import RolloutBatch
from ..runtime.collectives import ragged_gather, sum_over_processes
from .metrics import StepMetrics


@dataclass
class StepContext:
    """Counts and statistics of a step, which its micro-batches share."""

    counts: StepCounts
    metrics: StepMetrics
    entropy_threshold: float | None = None  # of the tokens at the step's quantile, in nats
    expert_share: torch.Tensor | None = None  # how often each expert is chosen per row (a token in a layer), (E,)
    router_rows: float = 0  # of the step: tokens times layers, over all processes
    top_k: int = 1  # experts per token


CONTEXT_KEY = "grpo_ext_step"  # of TRL's dictionary, for the `MicroBatchContext`


def token_tensors(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tokens and masks of TRL's dictionary; the fifth has no part in the forward."""
    names = "prompt_ids", "completion_ids", "prompt_mask", "completion_mask"
    return [*(inputs[name] for name in names), inputs.get("tool_mask", inputs["completion_mask"])]


def loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """1 on the completion tokens that carry loss, (B, T): real, and written by the model."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def loss_tokens(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Tells which tokens carry loss, and how much, (B, T): 1 + id times the mask."""
    return (inputs["completion_ids"] + 1) * loss_mask(inputs)


@dataclass(frozen=True)
class MicroBatchContext:
    """What a micro-batch's loss needs to know of its step.

    The dictionary that TRL's `compute_loss` and `_compute_loss` take holds it under `CONTEXT_KEY`, so it passes through
    a user's overrides of them, and into copies of the dictionary.
    """

    step: StepContext
    part: MicroBatch  # the completions, by their rows of the step
    groups: Sequence[int]  # of each completion
    rows: TokenRows  # the tokens, without padding
    padded: Unchanged  # `token_tensors` of the dictionary, to notice when an override changes these
    tokens_BT: torch.Tensor  # `loss_tokens` of the dictionary
    sampler_logps_BT: torch.Tensor | None = None  # by the sampler itself; None where another one has sampled

    @property
    def weight(self) -> float:
        """0 where a process runs the micro-batch only to keep the collectives aligned."""
        return self.part.weight

    def rows_of(self, inputs: Mapping[str, Any]) -> TokenRows | None:
        """The tokens of a dictionary without padding; None where a user's override has changed them."""
        return self.rows if self.padded.are(*token_tensors(inputs)[:4]) else None

    def of(self, inputs: Mapping[str, Any], mask_BT: torch.Tensor, active_BT: torch.Tensor) -> MicroBatchContext:
        """This context, or that of an override's other tokens: their means, over `accumulation_steps`, as TRL's are."""
        if self.padded.are(*token_tensors(inputs)):
            return self
        both = own_BT, given_BT = self.tokens_BT, loss_tokens(inputs)
        width, rows = max(own_BT.size(1), given_BT.size(1)), len(given_BT)
        own_BT, given_BT = (torch.nn.functional.pad(part_BT, (0, width - part_BT.size(1))) for part_BT in both)
        same_rows = rows == len(own_BT)
        if same_rows and bool((own_BT == given_BT).all()):
            return self if both[0].size(1) == both[1].size(1) else replace(self, sampler_logps_BT=None)
        step, steps = self.step, self.accumulation_steps
        tokens, active = (float(part_BT.sum().clamp(min=1)) * steps for part_BT in (mask_BT, active_BT))
        counts = StepCounts(rows * steps, tokens, active, items=step.counts.items or step.counts.tokens)
        masked = same_rows and int(inputs["completion_mask"].sum()) != len(self.rows.targets())
        share, router_rows = None if masked else step.expert_share, step.router_rows * rows / len(own_BT)
        step = replace(step, counts=counts, router_rows=router_rows, expert_share=share)
        return replace(self, step=step, groups=(0,) * rows, sampler_logps_BT=None)

    def add_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Add the micro-batch's loss to the logged one; returns it, or zero at weight zero."""
        loss = loss if self.weight else loss * 0.0  # a subclass's own term does not know the weight
        self.step.metrics.add_total("loss", loss, 1.0)
        return loss

    @property
    def accumulation_steps(self) -> float:
        """The step's completions over the micro-batch's, whose mean divided by it is a part of the mean of the step."""
        whole, rest = divmod(self.step.counts.completions, len(self.groups))
        return whole + rest / len(self.groups) if rest else whole


@functools.cache
def _kind_in_loss(kind: type) -> type:
    def accumulation(view: Any) -> Any:
        steps, rows = view.micro_batch.accumulation_steps, view.per_device_train_batch_size
        if view.training and steps % 1:
            raise ConfigError(
                f"args.gradient_accumulation_steps is {steps:g} for this micro-batch of {rows} completions; use "
                "self.current_gradient_accumulation_steps, which may be a fraction, or sizes that divide the step."
            )
        return steps

    def phases(view: Any) -> Any:  # no error: TRL's own loss divides by it
        return view.micro_batch.accumulation_steps * view.geometry.steps_per_rollout

    def reduced(view: Any, protocol: Any) -> Any:
        plain: Any = object.__new__(kind)
        plain.__dict__ = view.__dict__
        return plain.__reduce_ex__(protocol)

    rows = property(lambda view: len(view.micro_batch.groups))
    sizes = {"gradient_accumulation_steps": property(accumulation), "steps_per_generation": property(phases)}
    sizes["per_device_train_batch_size"] = rows
    stands_for = {"__class__": property(lambda view: kind), "__reduce_ex__": reduced}  # copied and pickled as it
    return type(kind.__name__, (kind,), {**sizes, **stands_for, "__slots__": ("micro_batch", "training")})


def args_in_loss(args: Any, context: MicroBatchContext, training: bool) -> Any:
    """`args`, in which sizes mean for a micro-batch what they mean in TRL; all else is read and written in `args`."""
    view: Any = object.__new__(_kind_in_loss(args.__class__))
    view.__dict__, view.micro_batch, view.training = args.__dict__, context, training
    return view


def step_counts(tokens_B: Sequence[int], groups_B: Sequence[int]) -> StepCounts:
    """The denominators of completions, from the tokens of each that carry loss and the group it belongs to."""
    by_group = dict.fromkeys(groups_B, 0)
    for group, tokens in zip(groups_B, tokens_B):
        by_group[group] += tokens
    return StepCounts(len(tokens_B), sum(tokens_B), sum(tokens_B), by_group)


@dataclass(frozen=True)
class MicroBatchStatistics:
    """The statistics of a micro-batch, from a pass without gradients."""

    part: MicroBatch
    entropies_BT: torch.Tensor
    mask_BT: torch.Tensor  # 1 on tokens that carry loss
    experts: tuple[torch.Tensor, torch.Tensor, int] | None = None  # of `router_statistics`


def count_step(rollout: RolloutBatch, metrics: StepMetrics, top_k: int = 1) -> StepContext:
    """Count a step. Every process holds the whole step, so the counts need no collective."""
    counts = step_counts([int(mask.sum()) for mask in rollout.loss_masks], rollout.groups)
    if rollout.items_per_token is not None:
        counts = replace(counts, items=counts.tokens * rollout.items_per_token)
    return StepContext(counts, metrics, top_k=top_k)


def set_statistics(context: StepContext, measured: Sequence[MicroBatchStatistics], top_entropy_quantile: float) -> None:
    """Make the entropy threshold and the experts' shares of a step from its micro-batches; all processes together."""
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
