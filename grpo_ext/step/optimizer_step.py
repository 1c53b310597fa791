"""Optimizer steps on one process: planned, and planned again with smaller micro-batches where memory ends.

Differs from the Trainer's accumulation: the whole step is one call, so its denominators are known before the first
forward, the number of micro-batches may differ between processes, and a step that does not fit runs again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger

from ..batching.sizes import group_numbers
from ..errors import MemoryShortageError, PrecisionError
from ..forward.rows import TokenRows, Unchanged, padded_ids_and_mask
from ..precision.non_finite import FirstModule, bad_weight, explanation
from ..rollouts.batch import RolloutBatch
from ..runtime.collectives import first_of_all_processes, max_over_processes
from ..runtime.out_of_memory import MicroBatchLimits, free_memory
from .attempt import Attempt, Inputs, StepParts
from .gradients import FixedPointGradients, NativeGradients
from .loss import loss_mask
from .metrics import StepMetrics, StepWork
from .plan import MicroBatch, MicroBatchLayout, plan_step
from .statistics import STEP_PART, TOKENS, Measured, StepContext, StepPart, counted, set_statistics
from .terms import StepTerms

logger = get_logger(__name__)


class OptimizerStep:
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
        weight = None if self.parts.scorer.sharded else bad_weight(policy)
        with torch.no_grad(), self.parts.scorer.running(model), first.watching(policy):
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
        parts, args, scorer = self.parts, self.parts.args, self.parts.scorer
        sizes, policy = rollout.sizes(parts.multiple), parts.accelerator.unwrap_model(model)
        if not scorer.choice.settled(policy):
            with scorer.without_gradients(policy):
                scorer.choice.check(policy, parts.token_rows(rollout, terms.training))
        form = "padded" if any(rollout.gaps) else scorer.choice.form(policy)
        layout = MicroBatchLayout(max_rows, self.limits.tokens, form, parts.cost, args.unit_rows)
        rows = rollout.contributing_rows if terms.skip_zeros else range(len(rollout))
        micro_batches = plan_step(parts.accelerator, sizes, rows, layout)
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
        part, groups = MicroBatch(tuple(range(len(mask)))), group_numbers(len(mask), num_generations)
        metrics = StepMetrics(self.parts.accelerator.device)
        context, keep = StepContext(counted(mask.sum(1).tolist(), groups), metrics, top_k=terms.experts_per_token), None
        if terms.top_entropy_quantile < 1.0:
            with torch.no_grad():
                scores = self.parts.scorer.score_inputs(model, inputs, rows, terms.router, terms.log_probs)
            set_statistics(context, [Measured(part, scores[1], mask)], terms.top_entropy_quantile)
            keep = context.keep_mask(part.rows, mask.size(1), scores[1].device)
        padded = Unchanged(*(inputs[name] for name in TOKENS))
        return {**inputs, STEP_PART: StepPart(context, part.weight, groups, rows, padded, keep)}

    # ---- Gradients and memory -------------------------------------------------------------------------------------

    def _gradients(self, model: Any) -> NativeGradients | None:
        """How this step's gradients are added up; None where the engine does it."""
        if self.parts.scorer.sharded:
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
        form = self.parts.scorer.choice.form(attempt.model)
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
