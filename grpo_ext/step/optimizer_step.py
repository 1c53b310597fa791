"""One optimizer step: planned, counted, run micro-batch by micro-batch, and again with smaller ones where memory ends.

Differs from the Trainer's accumulation: the whole step is one call, so its denominators are known before the first
forward, and the number of micro-batches may differ between processes. `StepPlanner` plans an `Attempt`, and
`training_step` runs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import send_to_device

from ..batching.micro_batches import MicroBatch, MicroBatchLayout, TokenCost, plan_step
from ..batching.sizes import group_numbers
from ..config import GRPOConfig
from ..errors import MemoryShortageError, PrecisionError
from ..forward.rows import TokenRows, Unchanged, padded_ids_and_mask
from ..forward.runner import ForwardRunner
from ..precision.non_finite import FirstModule, bad_weight, explanation
from ..rollouts.batch import RolloutBatch
from ..rollouts.images import ImageSource
from ..runtime.clock import PhaseClock
from ..runtime.collectives import first_of_all_processes, max_over_processes
from ..runtime.out_of_memory import MicroBatchLimits, StepOutOfMemory, free_memory
from .gradients import Accumulation, FixedPointGradients, NativeGradients, accumulating, out_of_memory_on_all
from .loss import loss_mask
from .metrics import StepMetrics, StepWork
from .statistics import (
    STEP_PART,
    TOKENS,
    Measured,
    StepContext,
    StepPart,
    count_step,
    counted,
    set_statistics,
)
from .terms import StepTerms

logger = get_logger(__name__)

Inputs = dict[str, Any]  # a micro-batch as TRL's loss takes it


@dataclass(frozen=True)
class StepParts:
    """What runs a step; the same for every step of a run.

    Attributes:
        args: the loop's configuration.
        clock: takes the seconds of the phase "train".
        images: from the columns of completions to their images.
        pad_token_id: fills up micro-batches.
        cost: of a token, by which groups are assigned to processes.
    """

    accelerator: Accelerator
    args: GRPOConfig
    forwards: ForwardRunner
    clock: PhaseClock
    images: ImageSource
    pad_token_id: int
    cost: TokenCost

    @property
    def multiple(self) -> int | None:
        """TRL's `pad_to_multiple_of`."""
        multiple: Any = self.args.pad_to_multiple_of
        return multiple

    def token_rows(self, rollout: RolloutBatch, training: bool) -> TokenRows:
        """The tokens of completions, on the device."""
        return rollout.token_rows(self.accelerator.device, self.images.of_batch(rollout.columns, training))

    def collate(self, rollout: RolloutBatch, rows: Sequence[int], training: bool = True) -> tuple[Inputs, TokenRows]:
        """Some completions as TRL's loss takes them, padded, and their tokens without padding; on the device."""
        some = rollout.select(rows)
        batch = send_to_device(some.collate(self.pad_token_id, self.multiple), self.accelerator.device)
        batch["attention_mask"] = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        return batch, self.token_rows(some, training)


@dataclass
class Attempt:
    """One run through the micro-batches of this process.

    Attributes:
        rollout: the completions of the step, those of all processes.
        plan: the micro-batches of this process.
        work: the tokens of the step.
        gradients: how gradients are added up; None where an engine (FSDP, DeepSpeed) does it, or nothing is trained.
        context: the step-wide counts and statistics; set by `measure`.
        shortage: why memory ran out, on this process or another; None where it did not.
    """

    parts: StepParts
    model: Any
    rollout: RolloutBatch
    terms: StepTerms
    plan: list[MicroBatch]
    work: StepWork
    gradients: NativeGradients | None = None
    context: StepContext = field(init=False)
    shortage: str | None = None

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Inside, forwards run in the model's form; memory that runs out ends the attempt, on all processes."""
        try:
            with self.parts.clock.phase("train"), self.parts.forwards.running(self.model):
                yield
        except StepOutOfMemory as shortage:
            self.shortage = str(shortage)

    def measure(self, model: Any) -> None:
        """Count the step, and measure its statistics where a term needs one, before the first forward with gradients.

        Args:
            model: computes the entropies and router outputs of the statistics.
        """
        parts, terms = self.parts, self.terms
        self.context = count_step(self.rollout, StepMetrics(parts.accelerator.device), terms.experts_per_token)
        if not terms.needs_statistics:
            return
        measured: list[Measured] = []
        discard = None if self.gradients is None else self.gradients.discard
        plain = parts.forwards.without_gradients(parts.accelerator.unwrap_model(self.model))
        with out_of_memory_on_all(parts.accelerator, discard), plain:
            for part in self.plan:
                batch, rows = parts.collate(self.rollout, part.rows, terms.training)
                scores = parts.forwards.micro_batch_log_probs(model, batch, rows, terms.router, terms.log_probs)
                measured.append(Measured.of(part, scores, loss_mask(batch), terms.experts_per_token))
        set_statistics(self.context, measured, terms.top_entropy_quantile)

    def accumulating(self) -> AbstractContextManager[Accumulation]:
        """A context for the backward passes; afterwards `.grad` is that of the step. See `gradients.accumulating`."""
        return accumulating(self.parts.accelerator, self.model, self.gradients, len(self.plan))

    def micro_batches(self) -> Iterator[Inputs]:
        """The micro-batches of this process, once the step is measured."""
        return map(self.micro_batch, self.plan)

    def micro_batch(self, part: MicroBatch) -> Inputs:
        """A micro-batch as TRL's loss takes it, with its `StepPart`."""
        device, training = self.parts.accelerator.device, self.terms.training
        inputs, rows = self.parts.collate(self.rollout, part.rows, training)
        if self.terms.custom_loss and rows.images is not None:
            ids, _ = padded_ids_and_mask(inputs)
            inputs |= rows.images.as_trl(ids, rows.prompts_B, inputs["prompt_ids"].size(1))
        keep = None
        if self.context.entropy_keep is not None:
            keep = self.context.keep_mask(part.rows, inputs["completion_mask"].size(1), device)
        groups, padded = [self.rollout.groups[row] for row in part.rows], Unchanged(*(inputs[name] for name in TOKENS))
        inputs[STEP_PART] = step_part = StepPart(self.context, part.weight, groups, rows, padded, keep)
        steps = self.parts.args.geometry.steps_per_rollout if training else None
        items = step_part.items_in_batch(self.parts.accelerator.num_processes, steps)
        inputs["num_items_in_batch"] = torch.tensor(items, device=device)
        return inputs

    def log_values(self) -> dict[str, float]:
        """The logged values of the step: counts and sums are the same on every process, seconds and rates its own."""
        seconds = self.parts.clock.take()
        self.work.add_to(self.context.metrics)
        values = self.context.metrics.reduce()
        values |= self.work.logged(values, seconds.get("train", 0.0))
        return values | {f"time/{name}": value for name, value in seconds.items()}


class StepPlanner:
    """Plans optimizer steps.

    Attributes:
        limits: the micro-batch size that fits.
    """

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        self.limits = MicroBatchLimits(parts.args.per_device_train_batch_size, parts.args.micro_batch_tokens)

    def attempts(self, model: Any, rollout: RolloutBatch, terms: StepTerms) -> Iterator[Attempt]:
        """The step as it is run, and again with smaller micro-batches until an attempt fits into memory.

        Args:
            model: as the loop calls it.
            rollout: the completions of the step, those of all processes.

        Raises:
            MemoryShortageError: the smallest micro-batch does not fit.
        """
        gradients = self._gradients(model)
        for number in itertools.count():
            attempt = self._planned(model, rollout, self.limits.rows, terms, gradients)
            yield attempt
            if attempt.shortage is None:
                return
            free_memory()
            self._shrink(attempt, number)

    def evaluation(self, model: Any, rollout: RolloutBatch, terms: StepTerms) -> Attempt:
        """The forward passes alone, in micro-batches of the evaluation's size; arguments as of `attempts`."""
        return self._planned(model, rollout, self.parts.args.per_device_eval_batch_size, terms)

    @contextmanager
    def explaining(self, model: Any, what: str) -> Iterator[None]:
        """Inside, forwards of a step whose loss is not finite run again without gradients, to find the first module.

        Raises:
            PrecisionError: at the end, on every process, with the first module that produced the number.
        """
        policy, first = self.parts.accelerator.unwrap_model(model), FirstModule()
        weight = None if self.parts.forwards.sharded else bad_weight(policy)
        with torch.no_grad(), self.parts.forwards.running(model), first.watching(policy):
            yield
        module = first_of_all_processes(first.name)
        raise PrecisionError(f"{what}: {explanation(weight, module, self.parts.args.fp16)}.")

    def _planned(
        self,
        model: Any,
        rollout: RolloutBatch,
        max_rows: int,
        terms: StepTerms,
        gradients: NativeGradients | None = None,
    ) -> Attempt:
        """Assign the completions to processes and micro-batches; before the first pack, compare it with padding."""
        parts, args, forwards = self.parts, self.parts.args, self.parts.forwards
        sizes, policy = rollout.sizes(parts.multiple), parts.accelerator.unwrap_model(model)
        if not forwards.choice.settled(policy):
            with forwards.without_gradients(policy):
                forwards.choice.check(policy, parts.token_rows(rollout, terms.training))
        form = "padded" if any(rollout.gaps) else forwards.choice.form(policy)
        layout = MicroBatchLayout(
            max_rows=max_rows,
            max_tokens=self.limits.tokens,
            form=form,
            cost=parts.cost,
            unit_rows=args.unit_rows,
            processes=parts.accelerator.num_processes,
            rank=parts.accelerator.process_index,
            equal_counts=forwards.sharded,
        )
        rows = rollout.contributing_rows if terms.skip_zeros else range(len(rollout))
        micro_batches = plan_step(sizes, rows, layout)
        work = StepWork.of(sizes, rows, micro_batches, form)
        return Attempt(parts, model, rollout, terms, micro_batches, work, gradients)

    # ---- Batches of the user's own --------------------------------------------------------------------------------

    def tokens_of(self, inputs: Inputs, training: bool) -> TokenRows:
        """The tokens of a padded batch without padding, also of one that the user has made or changed."""
        rows = inputs[STEP_PART].rows_of(inputs) if STEP_PART in inputs else None
        if rows is None:
            images = self.parts.images.of_batch(inputs, training)
            rows = TokenRows.of_padded(*padded_ids_and_mask(inputs), inputs["completion_ids"].size(1), images)
        return rows

    def as_step(self, model: Any, inputs: Inputs, num_generations: int, terms: StepTerms) -> Inputs:
        """A batch with log-probabilities and advantages that is no part of a step, with itself as its step.

        Args:
            inputs: TRL's dictionary, of a user's own call; it begins with a whole group.
        """
        rows, mask = self.tokens_of(inputs, terms.training), loss_mask(inputs)
        whole, groups = MicroBatch(tuple(range(len(mask)))), group_numbers(len(mask), num_generations)
        metrics = StepMetrics(self.parts.accelerator.device)
        context = StepContext(counted(mask.sum(1).tolist(), groups), metrics, top_k=terms.experts_per_token)
        keep = None
        if terms.top_entropy_quantile < 1.0:
            with torch.no_grad():
                _, entropies, _ = self.parts.forwards.micro_batch_log_probs(
                    model, inputs, rows, terms.router, terms.log_probs
                )
            set_statistics(context, [Measured(whole, entropies, mask)], terms.top_entropy_quantile)
            keep = context.keep_mask(whole.rows, mask.size(1), entropies.device)
        padded = Unchanged(*(inputs[name] for name in TOKENS))
        return {**inputs, STEP_PART: StepPart(context, 1.0, groups, rows, padded, keep)}

    # ---- Gradients and memory -------------------------------------------------------------------------------------

    def _gradients(self, model: Any) -> NativeGradients | None:
        """How this step's gradients are added up; None where the engine does it."""
        if self.parts.forwards.sharded:
            return None
        names, parameters = zip(*self.parts.accelerator.unwrap_model(model).named_parameters())
        if not self.parts.args.bitwise_invariant:
            return NativeGradients(parameters, self.parts.accelerator)
        return FixedPointGradients(parameters, self.parts.accelerator, names)

    def _shrink(self, attempt: Attempt, number: int) -> None:
        """Lower the limits after attempt `number` of a step, which did not fit.

        Raises:
            MemoryShortageError: nothing smaller is left.
        """
        sizes, reason = attempt.rollout.sizes(self.parts.multiple), attempt.shortage
        unit_rows, device = self.parts.args.unit_rows, self.parts.accelerator.device
        if unit_rows is not None and number:
            raise MemoryShortageError(
                f"the step ran out of memory twice ({reason}) with canonical units of {unit_rows} completion(s), which "
                "bitwise_invariant=True does not cut. Helpful: a smaller canonical_unit_size (it belongs to what the "
                "run means), gradient_checkpointing=True, a smaller max_completion_length."
            )
        form = self.parts.forwards.choice.form(attempt.model)
        rows = max(len(part.rows) for part in attempt.plan)
        tokens = max(sizes.tokens(part.rows, form) for part in attempt.plan)
        rows, tokens = max_over_processes(rows, device), max_over_processes(tokens, device)
        if unit_rows is not None:
            self.limits.failures += 1
            logger.warning(f"Out of memory in the step ({reason}); its units run again after freeing memory.")
            return
        allowed = self.limits.shrink(rows, tokens)
        logger.warning(
            f"Out of memory in the step ({reason}); it runs again with {allowed}, and so do all that follow. The "
            "update is the same."
        )
