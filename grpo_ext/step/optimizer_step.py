"""Plans an optimizer step: its micro-batches, counts and log values; smaller ones where memory runs out.

Differs from the Trainer's accumulation: the whole step is one call, so its denominators are known before the first
forward, and the number of micro-batches may differ between processes. `StepPlanner` plans an `Attempt`, and
`training_step` runs it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils.memory import clear_device_cache

from ..algorithms.losses import router_statistics
from ..batching.micro_batches import Form, MicroBatch, MicroBatchLayout, StepSizes, TokenCost, plan_step
from ..batching.sizes import group_numbers
from ..config import GRPOConfig
from ..errors import MemoryShortageError
from ..forward.rows import TokenRows, Unchanged, padded_ids_and_mask
from ..forward.runner import ForwardRunner
from ..precision.non_finite import explaining
from ..rollouts.batch import SAMPLER_LOGPS, RolloutBatch
from ..rollouts.images import ImageSource
from ..runtime.clock import PhaseClock
from ..runtime.collectives import max_over_processes, together, uneven_collectives
from ..runtime.out_of_memory import MicroBatchLimits, StepOutOfMemory
from ..runtime.transfer import to_device
from .gradients import FixedPointGradients, NativeGradients
from .metrics import StepMetrics, token_counts
from .settings import StepSettings
from .statistics import (
    CONTEXT_KEY,
    MicroBatchContext,
    MicroBatchStatistics,
    StepContext,
    count_step,
    loss_mask,
    loss_tokens,
    set_statistics,
    step_counts,
    token_tensors,
)

logger = get_logger(__name__)

_FILLERS = "a process may run micro-batches that do not count, to run as many as the others"
Inputs = dict[str, Any]  # a micro-batch as TRL's loss takes it


@dataclass(kw_only=True)
class Attempt:
    """One run through the micro-batches of this process."""

    planner: StepPlanner
    model: Any  # as the loop calls it
    rollout: RolloutBatch  # the completions of the step, those of all processes
    settings: StepSettings
    sizes: StepSizes
    form: Form
    rows: Sequence[int]  # the completions that are run, on all processes; the others add nothing to the step
    plan: list[MicroBatch]
    gradients: NativeGradients | None = None  # None where an engine (FSDP, DeepSpeed) adds them up
    context: StepContext = field(init=False)  # set by `measure`
    _current: MicroBatch = field(default=MicroBatch(()), init=False)
    shortage: str | None = None  # why memory ran out, on this process or another

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, forwards run in the model's form; an error, or memory that runs out, ends it on all processes."""
        clock, forwards, sharded = self.planner.clock, self.planner.forwards, self.planner.forwards.sharded
        refused = _FILLERS if self.settings.equal_counts and not sharded else None
        uneven = uneven_collectives(forwards.accelerator, lambda: not self._current.weight, others_refused=refused)
        try:
            with clock.phase("train"), forwards.in_form_of(self.model), together("a step", sharded, again=True), uneven:
                yield
        except StepOutOfMemory as shortage:
            self.shortage = str(shortage)
            if self.gradients is not None:
                self.gradients.discard()

    def measure(self, model: Any) -> None:
        """Count the step, and measure its statistics with `model` where a term needs one; before any gradient."""
        planner, settings, accelerator = self.planner, self.settings, self.planner.accelerator
        top_k = settings.experts_per_token
        self.context = count_step(self.rollout, StepMetrics(accelerator.device), top_k)
        if settings.top_entropy_quantile >= 1.0 and not settings.router:
            return
        measured: list[MicroBatchStatistics] = []
        with planner.forwards.without_gradients(accelerator.unwrap_model(self.model)):
            for part in self.plan:
                self._current = part
                batch, rows = planner.collate(self.rollout, part.rows, settings.training)
                _, entropies_BT, router, _ = planner.forwards.micro_batch_log_probs(model, batch, rows, settings.router)
                experts = None if router is None else router_statistics(router.logits, router.counts_BL, top_k)
                measured.append(MicroBatchStatistics(part, entropies_BT, loss_mask(batch), experts))
        set_statistics(self.context, measured, settings.top_entropy_quantile)

    def micro_batch(self, part: MicroBatch) -> Inputs:
        """A micro-batch as TRL's loss takes it, with its `MicroBatchContext`, once the step is measured."""
        training, planner, self._current = self.settings.training, self.planner, part
        # TRL's loss divides it by the processes, and in training by the steps of a rollout batch
        repeats = planner.accelerator.num_processes * (planner.args.geometry.steps_per_rollout if training else 1)
        items = self.context.counts.items or self.context.counts.tokens
        constants = {"num_items_in_batch": torch.tensor(float(items * repeats))}
        inputs, rows = planner.collate(self.rollout, part.rows, training, constants)
        if self.settings.custom_loss and rows.images is not None:
            ids, _ = padded_ids_and_mask(inputs)
            inputs |= rows.images.as_trl(ids)
        groups, sampler_logps = [self.rollout.groups[row] for row in part.rows], inputs.pop(SAMPLER_LOGPS, None)
        padded = Unchanged(*token_tensors(inputs))
        tokens = loss_tokens(inputs)
        inputs[CONTEXT_KEY] = MicroBatchContext(self.context, part, groups, rows, padded, tokens, sampler_logps)
        return inputs

    def refuse_not_finite(self, loss: float, step: int, run: Callable[[Inputs], Any]) -> None:
        """End the run where the loss of a step is not finite; its forwards `run` again to find out where that began."""
        if not math.isfinite(loss):
            planner, policy = self.planner, self.planner.accelerator.unwrap_model(self.model)
            what = f"the loss of step {step} is {loss}"
            with explaining(what, policy, planner.args.fp16, planner.forwards.sharded), self.running():
                for micro_batch in map(self.micro_batch, self.plan):
                    run(micro_batch)

    def log_values(self) -> dict[str, float]:
        """The logged values of the step. Counts and sums are the same on every process; seconds and rates are not."""
        seconds, metrics = self.planner.clock.take(), self.context.metrics
        useful, computed, padding = token_counts(self.sizes, self.rows, self.plan, self.form)
        metrics.add_total("computed", float(computed), 1.0)
        metrics.add_total("padding", float(padding), 1.0)
        values = metrics.reduce()
        computed_anywhere, padding_anywhere = values.pop("computed"), values.pop("padding")
        duplicates = max(computed_anywhere - padding_anywhere - useful, 0.0)
        values["layout/padding_share"] = padding_anywhere / max(computed_anywhere, 1.0)
        values["layout/duplicate_share"] = duplicates / max(computed_anywhere, 1.0)
        values["layout/useful_tokens_per_second"] = useful / max(seconds.get("train", 0.0), 1e-9)
        return values | {f"time/{name}": value for name, value in seconds.items()}


@dataclass(kw_only=True)
class StepPlanner:
    """Plans optimizer steps and evaluations."""

    accelerator: Accelerator
    args: GRPOConfig
    forwards: ForwardRunner
    clock: PhaseClock
    images: ImageSource  # from the columns of completions
    pad_token_id: int
    cost: TokenCost  # by which groups are assigned to processes
    limits: MicroBatchLimits = field(init=False)
    eval_limits: MicroBatchLimits = field(init=False)

    def __post_init__(self) -> None:
        self.limits = MicroBatchLimits(self.args.per_device_train_batch_size, self.args.micro_batch_tokens)
        self.eval_limits = MicroBatchLimits(self.args.per_device_eval_batch_size, self.args.micro_batch_tokens)

    def attempts(self, model: Any, rollout: RolloutBatch, settings: StepSettings) -> Iterator[Attempt]:
        """Yield attempts at a step or an evaluation, each with smaller micro-batches, until one fits into memory.

        Raises:
            MemoryShortageError: the smallest micro-batch does not fit.
        """
        gradients = None
        if not self.forwards.sharded:  # else the engine adds them up
            kind = FixedPointGradients if self.args.bitwise_invariant else NativeGradients
            gradients = kind(self.accelerator.unwrap_model(model), self.accelerator)
        for number in itertools.count():
            attempt = self._planned(model, rollout, settings, gradients)
            yield attempt
            if attempt.shortage is None:
                return
            clear_device_cache(garbage_collection=True)
            self._shrink(attempt, number)

    def _planned(
        self, model: Any, rollout: RolloutBatch, settings: StepSettings, gradients: NativeGradients | None
    ) -> Attempt:
        """Assign the completions to processes and micro-batches."""
        forwards, limits = self.forwards, self.limits if settings.training else self.eval_limits
        form = "padded" if any(rollout.gaps) else forwards.choice.form(model)
        layout = MicroBatchLayout(
            max_rows=limits.rows,
            max_tokens=limits.tokens,
            form=form,
            cost=self.cost,
            unit_rows=self.args.unit_rows,
            whole_groups=forwards.float32_weight_gradients and form != "padded",
            processes=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            equal_counts=forwards.sharded or settings.equal_counts,
        )
        sizes = rollout.sizes(self.forwards.multiple)
        rows = rollout.contributing_rows if settings.skip_zeros else range(len(rollout))
        return Attempt(
            planner=self,
            model=model,
            rollout=rollout,
            settings=settings,
            sizes=sizes,
            form=form,
            rows=rows,
            plan=plan_step(sizes, rows, layout),
            gradients=gradients,
        )

    # ---- Batches --------------------------------------------------------------------------------------------------

    def collate(
        self, rollout: RolloutBatch, rows: Sequence[int], training: bool, constants: Inputs | None = None
    ) -> tuple[Inputs, TokenRows]:
        """TRL's padded dictionary of completions, with `constants`, on the device; and the tokens without padding."""
        selected = rollout.select(rows)
        batch = selected.collate(self.pad_token_id, self.forwards.multiple) | (constants or {})
        batch["attention_mask"] = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        lengths = [rollout.group_lengths[group] for group in selected.groups]
        tokens = replace(self._token_rows(selected, training), group_lengths_B=lengths)
        return to_device(batch, self.accelerator.device), tokens

    def _token_rows(self, rollout: RolloutBatch, training: bool) -> TokenRows:
        return rollout.token_rows(self.images.of_batch(rollout.columns))

    def tokens_of(self, inputs: Inputs, training: bool) -> TokenRows:
        """The tokens of a padded batch without padding; read from its tensors where a user built or changed it.

        Raises:
            ConfigError: a user built or changed it, and sampling masks or experts are replayed.
        """
        rows = inputs[CONTEXT_KEY].rows_of(inputs) if CONTEXT_KEY in inputs else None
        if rows is None:
            self.args.replay.refuse_other_tokens(
                "an override of compute_loss or _compute_loss passes on other tokens or masks than it was given"
            )
            images = self.images.of_batch(inputs)
            rows = TokenRows.of_padded(*padded_ids_and_mask(inputs), inputs["completion_ids"].size(1), images)
        return rows

    def as_step(self, model: Any, inputs: Inputs, num_generations: int, settings: StepSettings) -> Inputs:
        """Count a user's batch, which begins with a whole group, as a step of its own; add its `MicroBatchContext`."""
        rows, mask, top_k = self.tokens_of(inputs, settings.training), loss_mask(inputs), settings.experts_per_token
        whole, groups = MicroBatch(tuple(range(len(mask)))), group_numbers(len(mask), num_generations)
        step = StepContext(step_counts(mask.sum(1).tolist(), groups), StepMetrics(self.accelerator.device), top_k=top_k)
        if settings.top_entropy_quantile < 1.0:
            with torch.no_grad():
                scores = self.forwards.micro_batch_log_probs(model, inputs, rows, settings.router)
            set_statistics(step, [MicroBatchStatistics(whole, scores.entropies, mask)], settings.top_entropy_quantile)
        padded = Unchanged(*token_tensors(inputs))
        return {**inputs, CONTEXT_KEY: MicroBatchContext(step, whole, groups, rows, padded, loss_tokens(inputs))}

    # ---- Memory ---------------------------------------------------------------------------------------------------

    def _shrink(self, attempt: Attempt, number: int) -> None:
        """Lower the limits after attempt `number` did not fit; a MemoryShortageError where nothing smaller is left."""
        unit_rows, reason = self.args.unit_rows, attempt.shortage
        limits, what = (self.limits, "a step") if attempt.settings.training else (self.eval_limits, "an evaluation")
        if unit_rows is not None:
            if number:
                raise MemoryShortageError(
                    f"{what} ran out of memory twice ({reason}) with canonical units of {unit_rows} completion(s), "
                    "which bitwise_invariant=True does not cut. What helps: a smaller canonical_unit_size (it belongs "
                    "to what the run means), gradient_checkpointing=True, a smaller max_completion_length."
                )
            limits.failures += 1
            logger.warning(f"Out of memory in {what} ({reason}); its units run again after freeing memory.")
            return
        rows = max_over_processes(max(len(part.rows) for part in attempt.plan))
        tokens = max(attempt.sizes.tokens(part.rows, attempt.form) for part in attempt.plan)
        allowed = limits.shrink(rows, max_over_processes(tokens), what)
        logger.warning(
            f"Out of memory in {what} ({reason}); it runs again with {allowed}, and so do all that follow. What it "
            "computes is the same."
        )
