"""Plans an optimizer step: its micro-batches, counts and log values; smaller ones where memory runs out.

Differs from the Trainer's accumulation: the whole step is one call, so its denominators are known before the first
forward, and the number of micro-batches may differ between processes. `StepPlanner` plans an `Attempt`, and
`training_step` runs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from ..rollouts.batch import SAMPLER_LOGPS, RolloutBatch
from ..rollouts.images import ImageSource
from ..runtime.clock import PhaseClock
from ..runtime.collectives import max_over_processes
from ..runtime.out_of_memory import MicroBatchLimits, StepOutOfMemory
from ..runtime.transfer import to_device
from .gradients import FixedPointGradients, NativeGradients, out_of_memory_on_all
from .loss import loss_mask
from .metrics import StepMetrics, token_counts
from .settings import StepSettings
from .statistics import (
    CONTEXT_KEY,
    MicroBatchContext,
    MicroBatchStatistics,
    StepContext,
    count_step,
    set_statistics,
    step_counts,
    token_tensors,
)

logger = get_logger(__name__)

Inputs = dict[str, Any]  # a micro-batch as TRL's loss takes it


@dataclass(kw_only=True)
class Attempt:
    """One run through the micro-batches of this process.

    Attributes:
        model: as the loop calls it.
        rollout: the completions of the step, those of all processes.
        sizes, form: the tokens of the completions, and how a forward holds them.
        rows: the completions that are run, on all processes; the others add nothing to the step.
        gradients: how gradients are added up; None where an engine (FSDP, DeepSpeed) does it, or nothing is trained.
        context: the step-wide counts and statistics; set by `measure`.
        shortage: why memory ran out, on this process or another; None where it did not.
    """

    planner: StepPlanner
    model: Any
    rollout: RolloutBatch
    settings: StepSettings
    sizes: StepSizes
    form: Form
    rows: Sequence[int]
    plan: list[MicroBatch]
    gradients: NativeGradients | None = None
    context: StepContext = field(init=False)
    shortage: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, forwards run in the model's form; memory that runs out ends the attempt, on all processes."""
        try:
            with self.planner.clock.phase("train"), self.planner.forwards.in_form_of(self.model):
                yield
        except StepOutOfMemory as shortage:
            self.shortage = str(shortage)

    def measure(self, model: Any) -> None:
        """Count the step, and measure its statistics with `model` where a term needs one; before any gradient."""
        planner, settings, accelerator = self.planner, self.settings, self.planner.accelerator
        top_k = settings.experts_per_token
        self.context = count_step(self.rollout, StepMetrics(accelerator.device), top_k)
        if settings.top_entropy_quantile >= 1.0 and not settings.router:
            return
        measured: list[MicroBatchStatistics] = []
        discard = None if self.gradients is None else self.gradients.discard
        without_gradients = planner.forwards.without_gradients(accelerator.unwrap_model(self.model))
        with out_of_memory_on_all(accelerator, discard), without_gradients:
            for part in self.plan:
                batch, rows = planner.collate(self.rollout, part.rows, settings.training)
                _, entropies_BT, router, _ = planner.forwards.micro_batch_log_probs(model, batch, rows, settings.router)
                experts = None if router is None else router_statistics(router.logits, router.counts_BL, top_k)
                measured.append(MicroBatchStatistics(part, entropies_BT, loss_mask(batch), experts))
        set_statistics(self.context, measured, settings.top_entropy_quantile)

    def micro_batch(self, part: MicroBatch) -> Inputs:
        """A micro-batch as TRL's loss takes it, with its `MicroBatchContext`, once the step is measured."""
        training, planner = self.settings.training, self.planner
        steps = planner.args.geometry.steps_per_rollout if training else None
        items = self.context.items_in_batch(len(part.rows), planner.accelerator.num_processes, steps)
        constants = {"num_items_in_batch": torch.tensor(items)}
        inputs, rows = planner.collate(self.rollout, part.rows, training, constants)
        if self.settings.custom_loss and rows.images is not None:
            ids, _ = padded_ids_and_mask(inputs)
            inputs |= rows.images.as_trl(ids, rows.prompts_B, inputs["prompt_ids"].size(1))
        groups, sampler_logps = [self.rollout.groups[row] for row in part.rows], inputs.pop(SAMPLER_LOGPS, None)
        padded = Unchanged(*token_tensors(inputs))
        inputs[CONTEXT_KEY] = MicroBatchContext(self.context, part, groups, rows, padded, sampler_logps)
        return inputs

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
    """Plans optimizer steps.

    Attributes:
        clock: takes the seconds of the phase "train".
        images: from the columns of completions to their images.
        cost: of a token, by which groups are assigned to processes.
    """

    accelerator: Accelerator
    args: GRPOConfig
    forwards: ForwardRunner
    clock: PhaseClock
    images: ImageSource
    pad_token_id: int
    cost: TokenCost
    limits: MicroBatchLimits = field(init=False)

    def __post_init__(self) -> None:
        self.limits = MicroBatchLimits(self.args.per_device_train_batch_size, self.args.micro_batch_tokens)

    def attempts(self, model: Any, rollout: RolloutBatch, settings: StepSettings) -> Iterator[Attempt]:
        """Yield attempts at a step, each with smaller micro-batches, until one fits into memory.

        Raises:
            MemoryShortageError: the smallest micro-batch does not fit.
        """
        gradients = None
        if not self.forwards.sharded:  # else the engine adds them up
            kind = FixedPointGradients if self.args.bitwise_invariant else NativeGradients
            gradients = kind(self.accelerator.unwrap_model(model), self.accelerator)
        for number in itertools.count():
            attempt = self._planned(model, rollout, settings, self.limits.rows, gradients)
            yield attempt
            if attempt.shortage is None:
                return
            clear_device_cache(garbage_collection=True)
            self._shrink(attempt, number)

    def evaluation(self, model: Any, rollout: RolloutBatch, settings: StepSettings) -> Attempt:
        """An attempt without gradients, in micro-batches of the evaluation's size."""
        return self._planned(model, rollout, settings, self.args.per_device_eval_batch_size, None)

    def _planned(
        self,
        model: Any,
        rollout: RolloutBatch,
        settings: StepSettings,
        max_rows: int,
        gradients: NativeGradients | None,
    ) -> Attempt:
        """Assign the completions to processes and micro-batches; before the first pack, compare it with padding."""
        forwards, policy = self.forwards, self.accelerator.unwrap_model(model)
        if not forwards.choice.settled(policy):
            with forwards.without_gradients(policy):
                forwards.choice.check(policy, self._token_rows(rollout, settings.training))
        form = "padded" if any(rollout.gaps) else forwards.choice.form(policy)
        layout = MicroBatchLayout(
            max_rows=max_rows,
            max_tokens=self.limits.tokens,
            form=form,
            cost=self.cost,
            unit_rows=self.args.unit_rows,
            processes=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            equal_counts=forwards.sharded,
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
        return to_device(batch, self.accelerator.device), self._token_rows(selected, training)

    def _token_rows(self, rollout: RolloutBatch, training: bool) -> TokenRows:
        return rollout.token_rows(self.images.of_batch(rollout.columns, training))

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
            images = self.images.of_batch(inputs, training)
            rows = TokenRows.of_padded(*padded_ids_and_mask(inputs), inputs["completion_ids"].size(1), images)
        return rows

    def as_step(self, model: Any, inputs: Inputs, num_generations: int, settings: StepSettings) -> Inputs:
        """Treat a user's batch as a whole step: count it, and add its `MicroBatchContext`.

        Args:
            inputs: TRL's dictionary, with advantages; it begins with a whole group.
        """
        rows, mask, top_k = self.tokens_of(inputs, settings.training), loss_mask(inputs), settings.experts_per_token
        whole, groups = MicroBatch(tuple(range(len(mask)))), group_numbers(len(mask), num_generations)
        step = StepContext(step_counts(mask.sum(1).tolist(), groups), StepMetrics(self.accelerator.device), top_k=top_k)
        if settings.top_entropy_quantile < 1.0:
            with torch.no_grad():
                scores = self.forwards.micro_batch_log_probs(model, inputs, rows, settings.router)
            set_statistics(step, [MicroBatchStatistics(whole, scores.entropies, mask)], settings.top_entropy_quantile)
        padded = Unchanged(*token_tensors(inputs))
        return {**inputs, CONTEXT_KEY: MicroBatchContext(step, whole, groups, rows, padded)}

    # ---- Memory ---------------------------------------------------------------------------------------------------

    def _shrink(self, attempt: Attempt, number: int) -> None:
        """Lower the limits after attempt `number` did not fit; a MemoryShortageError where nothing smaller is left."""
        unit_rows, device, reason = self.args.unit_rows, self.accelerator.device, attempt.shortage
        if unit_rows is not None and number:
            raise MemoryShortageError(
                f"the step ran out of memory twice ({reason}) with canonical units of {unit_rows} completion(s), which "
                "bitwise_invariant=True does not cut. Helpful: a smaller canonical_unit_size (it belongs to what the "
                "run means), gradient_checkpointing=True, a smaller max_completion_length."
            )
        if unit_rows is not None:
            self.limits.failures += 1
            logger.warning(f"Out of memory in the step ({reason}); its units run again after freeing memory.")
            return
        rows = max_over_processes(max(len(part.rows) for part in attempt.plan), device)
        tokens = max(attempt.sizes.tokens(part.rows, attempt.form) for part in attempt.plan)
        allowed = self.limits.shrink(rows, max_over_processes(tokens, device))
        logger.warning(
            f"Out of memory in the step ({reason}); it runs again with {allowed}, and so do all that follow. The "
            "update is the same."
        )
