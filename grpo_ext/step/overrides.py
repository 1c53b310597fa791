"""The detour of a micro-batch through a user's `compute_loss` or `_compute_loss`, in TRL's dictionary.

Inside a loss every dictionary that reaches `_compute_loss` belongs to the micro-batch in progress, which is kept here
because TRL's signature has no place for it. Tensors that an override passes on unchanged run as its rows; other rows,
tokens and masks are used as they are and counted as TRL counts them. Outside a loss a dictionary is a whole step.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..algorithms.losses import StepCounts
from ..batching.micro_batches import MicroBatch
from ..batching.sizes import group_numbers
from ..errors import ConfigError
from ..forward.rows import TokenRows
from ..forward.runner import OverridableRunner, Unchanged, padded_ids_and_mask
from ..rollouts.batch import SAMPLER_LOGPS
from ..rollouts.images import ImageSource
from ..runtime.attributes import assigned
from ..view import TrainerView
from .inputs import LossInputs
from .loss import active_tokens, assemble_loss
from .settings import loss_config_of, step_settings_of
from .statistics import MicroBatchStatistics, StepContext, StepMetrics, loss_mask, set_statistics, step_counts


def _tokens(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [inputs[name] for name in ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")]


def _loss_tokens(inputs: Mapping[str, Any]) -> torch.Tensor:
    """(1 + token id) * loss mask, (B, T): differs where a token that carries loss, or its weight, differs."""
    return (inputs["completion_ids"] + 1) * loss_mask(inputs)


@dataclass(frozen=True)
class _Call:
    micro_batch: LossInputs
    tokens: Unchanged
    loss_tokens_BT: torch.Tensor


@dataclass
class LossOverrides:
    view: TrainerView
    forwards: OverridableRunner
    images: ImageSource
    _call: _Call | None = None  # in progress: TRL's signature of a loss has no place for it

    @contextmanager
    def calling(self, micro_batch: LossInputs) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield TRL's dictionary of the micro-batch, and the sizes to set on the trainer meanwhile."""
        inputs = self._dictionary(micro_batch)
        args = args_in_loss(self.view.args, micro_batch, self.view.model.training)
        call = _Call(micro_batch, Unchanged(*_tokens(inputs)), _loss_tokens(inputs))
        with assigned(self, _call=call), self.forwards.calling(*padded_ids_and_mask(inputs), micro_batch.rows):
            yield inputs, {"current_gradient_accumulation_steps": micro_batch.accumulation_steps, "args": args}

    def _dictionary(self, micro_batch: LossInputs) -> dict[str, Any]:
        view, counts, images = self.view, micro_batch.step.counts, micro_batch.rows.images
        # TRL's loss divides `num_items_in_batch` by the processes, and in training by the steps of a rollout batch
        repeats = view.accelerator.num_processes * (view.geometry.steps_per_rollout if view.model.training else 1)
        items = torch.tensor(float((counts.items or counts.tokens) * repeats), device=view.accelerator.device)
        inputs = {name: column for name, column in micro_batch.columns.items() if name != SAMPLER_LOGPS}
        inputs["num_items_in_batch"] = items
        if images is not None:
            ids, _ = padded_ids_and_mask(inputs)
            inputs |= images.as_trl(ids)
        return inputs

    def loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Compute what a dictionary adds to the loss of the step; outside a step it is a whole step."""
        call = self._call
        rows = self._rows_of(inputs, call)
        with assigned(self.forwards, group=None):  # one process may call this alone
            micro_batch = self._own_step(inputs, rows) if call is None else call.micro_batch
            scores = self.forwards.micro_batch_log_probs(model, inputs, rows, self.view.aux_loss_enabled)
        if call is not None:
            micro_batch = _counted(call, replace(micro_batch, rows=rows, columns=inputs), scores.entropies)
        return assemble_loss(loss_config_of(self.view), micro_batch, scores)

    def entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, quantile: float) -> torch.Tensor | None:
        """The tokens above the threshold of the step, for a loss that asks TRL's method; None outside a step."""
        if self._call is None:
            return None
        threshold, share = self._call.micro_batch.step.entropy_threshold, self.view.top_entropy_quantile
        if threshold is None or not math.isclose(quantile, 1 - share):
            raise ConfigError(
                f"get_high_entropy_mask was called with the quantile {quantile:g}, and top_entropy_quantile={share:g}: "
                f"the threshold of a step is measured for {1 - share:g} alone, and that of a micro-batch would depend "
                f"on the split. Set top_entropy_quantile={1 - quantile:g}."
            )
        return active_tokens(mask, entropies, threshold).bool()

    def _rows_of(self, inputs: Mapping[str, Any], call: _Call | None) -> TokenRows:
        """The rows of the micro-batch in progress, or those of tensors that a user made."""
        if call is not None and call.tokens.are(*_tokens(inputs)):
            return call.micro_batch.rows
        self.view.args.replay.refuse_other_tokens(
            "an override of compute_loss or _compute_loss passes on other tokens or masks than it was given"
        )
        images = self.images.of_batch(inputs)
        rows = TokenRows.of_padded(*padded_ids_and_mask(inputs), inputs["completion_ids"].size(1), images)
        return rows if call is None else rows.with_dropout_of(call.micro_batch.rows)

    def _own_step(self, inputs: dict[str, Any], rows: TokenRows) -> LossInputs:
        """Count a batch of the user's own as a step; its groups are whole, from its first row on."""
        settings, mask = step_settings_of(self.view), loss_mask(inputs)
        whole, groups = MicroBatch(tuple(range(len(mask)))), group_numbers(len(mask), self.view.group_size)
        metrics, counts = StepMetrics(self.view.accelerator.device), step_counts(mask.sum(1).tolist(), groups)
        step = StepContext(counts, metrics, top_k=settings.experts_per_token)
        if settings.top_entropy_quantile < 1.0:
            with torch.no_grad():
                scores = self.forwards.micro_batch_log_probs(self.view.model, inputs, rows, settings.router)
            set_statistics(step, [MicroBatchStatistics(whole, scores.entropies, mask)], settings.top_entropy_quantile)
        return LossInputs(step, whole, groups, rows, inputs)


def _counted(call: _Call, micro_batch: LossInputs, entropies_BT: torch.Tensor) -> LossInputs:
    """Count the tokens that an override passes on.

    Unchanged tokens keep the counts of the step. With others, means are over these tokens and divided by
    `accumulation_steps`, as in TRL.
    """
    original, inputs = call.micro_batch, micro_batch.columns
    both = before_BT, after_BT = call.loss_tokens_BT, _loss_tokens(inputs)
    width, rows = max(before_BT.size(1), after_BT.size(1)), len(after_BT)
    before_BT, after_BT = (torch.nn.functional.pad(part_BT, (0, width - part_BT.size(1))) for part_BT in both)
    same_rows = rows == len(before_BT)
    if same_rows and bool((before_BT == after_BT).all()):
        same_width = both[0].size(1) == both[1].size(1)
        sampler_logps = {n: column for n, column in original.columns.items() if n == SAMPLER_LOGPS and same_width}
        return replace(micro_batch, columns=inputs | sampler_logps)
    step, steps, mask_BT = original.step, original.accumulation_steps, loss_mask(inputs)
    active_BT = active_tokens(mask_BT, entropies_BT, step.entropy_threshold)
    tokens, active = (float(part_BT.sum().clamp(min=1)) * steps for part_BT in (mask_BT, active_BT))
    counts = StepCounts(rows * steps, tokens, active, items=step.counts.items or step.counts.tokens)
    masked = same_rows and int(inputs["completion_mask"].sum()) != len(original.rows.targets())
    share, router_rows = None if masked else step.expert_share, step.router_rows * rows / len(before_BT)
    step = replace(step, counts=counts, router_rows=router_rows, expert_share=share)
    return replace(micro_batch, step=step, groups=(0,) * rows)


@functools.cache
def _kind_in_loss(kind: type) -> type:
    def accumulation(args: Any) -> Any:
        steps, rows = args.micro_batch.accumulation_steps, args.per_device_train_batch_size
        if args.training and steps % 1:
            raise ConfigError(
                f"args.gradient_accumulation_steps is {steps:g} for this micro-batch of {rows} completions; use "
                "self.current_gradient_accumulation_steps, which may be a fraction, or sizes that divide the step."
            )
        return steps

    def phases(args: Any) -> Any:  # no error: TRL's own loss divides by it
        return args.micro_batch.accumulation_steps * vars(args)["steps_per_generation"]

    def reduced(args: Any, protocol: Any) -> Any:
        plain: Any = object.__new__(kind)
        plain.__dict__ = args.__dict__
        return plain.__reduce_ex__(protocol)

    sizes = {"gradient_accumulation_steps": property(accumulation), "steps_per_generation": property(phases)}
    sizes["per_device_train_batch_size"] = property(lambda args: len(args.micro_batch.groups))
    stands_for = {"__class__": property(lambda args: kind), "__reduce_ex__": reduced}  # copies are of the real class
    return type(kind.__name__, (kind,), {**sizes, **stands_for, "__slots__": ("micro_batch", "training")})


def args_in_loss(args: Any, micro_batch: LossInputs, training: bool) -> Any:
    """`args` with the sizes of the micro-batch, as in TRL; all else is read from and written to `args` itself."""
    shown: Any = object.__new__(_kind_in_loss(args.__class__))
    shown.__dict__, shown.micro_batch, shown.training = args.__dict__, micro_batch, training
    return shown
