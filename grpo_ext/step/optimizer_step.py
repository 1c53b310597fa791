"""One optimizer step on one process: planned, counted, run in micro-batches, and again with smaller ones if need be.

Differs from the Trainer's accumulation: the whole step is one call, so its denominators are known before the first
forward, the number of micro-batches may differ between processes, and a step that does not fit runs again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from ..batching.micro_batches import Form, StepSizes, TokenCost, oversized
from ..config import GRPOConfig
from ..errors import MemoryShortageError, PrecisionError
from ..forward.images import RowImages
from ..forward.lm_head import RouterOutput
from ..forward.rows import TokenRows, Unchanged
from ..forward.scorer import Scorer
from ..precision.non_finite import FirstModule, bad_weight, explanation
from ..rollouts.batch import RolloutBatch, to_device
from ..runtime.clock import PhaseClock
from ..runtime.collectives import first_of_all_processes, max_over_processes
from ..runtime.out_of_memory import MicroBatchLimits, StepOutOfMemory, free_memory
from .backward import out_of_memory_on_all, run_micro_batches
from .gradients import FixedPointGradients, NativeGradients
from .loss import loss_mask
from .metrics import StepMetrics, StepWork
from .plan import MicroBatch, MicroBatchLayout, plan_step
from .statistics import STEP_PART, TOKENS, StepContext, StepPart, measure_step, whole_step

logger = get_logger(__name__)
Inputs = dict[str, Any]  # a micro-batch as TRL's loss takes it


@dataclass(frozen=True)
class StepTerms:
    """What the loss of a step is made of.

    Attributes:
        loss_of: from a micro-batch to its part of the loss of the step.
        score: from a micro-batch and its tokens to its log-probabilities and entropies (B, T), and the router output of
            a MoE model.
        skip_zeros: nothing but the policy loss acts on a completion, and that is linear in the advantage.
        top_entropy_quantile: share of the tokens with the highest entropy that carry loss; 1: all.
        router: a MoE model's load-balancing loss is added.
        experts_per_token: of a MoE model.
        between: runs after every micro-batch of this process but the last.
        images_for_trl: a micro-batch holds its images too, for a loss of the user's own.
        training: and not evaluating.
    """

    loss_of: Callable[[Inputs], torch.Tensor]
    score: Callable[[Inputs, TokenRows], tuple[torch.Tensor, torch.Tensor, RouterOutput | None]]
    skip_zeros: bool = False
    top_entropy_quantile: float = 1.0
    router: bool = False
    experts_per_token: int = 1
    between: Callable[[], None] = lambda: None
    images_for_trl: bool = False
    training: bool = True


@dataclass(frozen=True)
class StepPlan:
    """This process's micro-batches of a step, and the tokens of it."""

    micro_batches: list[MicroBatch]
    work: StepWork


class OptimizerStep:
    """Runs optimizer steps.

    Args:
        args: the loop's configuration.
        pad_token_id: what a micro-batch is padded with.
        cost: what a token costs, to assign groups to processes by.
        clock: takes the seconds of the phase "window".
        images: from the columns of completions to their images.

    Attributes:
        limits: the micro-batch size that fits.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: GRPOConfig,
        scorer: Scorer,
        pad_token_id: int,
        cost: TokenCost,
        clock: PhaseClock,
        images: Callable[[Mapping[str, Any]], RowImages | None] = lambda columns: None,
    ) -> None:
        self.accelerator, self.args, self.scorer, self.clock = accelerator, args, scorer, clock
        self.images = images
        self.pad_token_id, self.cost = pad_token_id, cost
        self.multiple: Any = args.pad_to_multiple_of
        self.limits = MicroBatchLimits(args.per_device_train_batch_size, args.micro_batch_tokens)
        self._said_oversized = False

    def run(self, model: Any, rollout: RolloutBatch, terms: StepTerms) -> tuple[StepContext, StepPlan]:
        """All forward and backward passes of a step; afterwards `.grad` is that of the step, on every process.

        Args:
            model: as the loop calls it.
            rollout: the completions of the step, those of all processes.

        Raises:
            MemoryShortageError: the smallest micro-batch does not fit.
            PrecisionError: in bitwise mode, gradients that are not finite or out of range.
        """
        gradients = self._gradients(model)
        for attempt in itertools.count():
            plan = self.plan(model, rollout, self.limits.rows, terms)
            try:
                with self.clock.phase("window"), self.scorer.running(model):
                    context = self.measure(model, rollout, plan, terms, gradients)
                    part_of_loss = functools.partial(self._loss, rollout, context, terms)
                    run_micro_batches(
                        self.accelerator, model, gradients, plan.micro_batches, part_of_loss, terms.between
                    )
                return context, plan
            except StepOutOfMemory as shortage:
                reason = str(shortage)
            free_memory()
            self._shrink(model, rollout, plan, reason, attempt)
        raise AssertionError  # not reached: _shrink raises where nothing smaller is left

    def evaluate(self, model: Any, rollout: RolloutBatch, terms: StepTerms) -> StepContext:
        """The forward passes alone, in micro-batches of the evaluation's size; arguments as of `run`."""
        plan = self.plan(model, rollout, self.args.per_device_eval_batch_size, terms)
        context = self.measure(model, rollout, plan, terms)
        for number, part in enumerate(plan.micro_batches):
            if number:
                terms.between()
            self._loss(rollout, context, terms, part)
        return context

    def explain(
        self, model: Any, rollout: RolloutBatch, context: StepContext, plan: StepPlan, terms: StepTerms, what: str
    ) -> None:
        """Run a step again, without gradients, whose loss is not finite, to find where the number comes from.

        Raises:
            PrecisionError: on every process, with the first module that produced the number.
        """
        policy, first = self.accelerator.unwrap_model(model), FirstModule()
        weight = None if self.scorer.sharded else bad_weight(policy)
        with torch.no_grad(), self.scorer.running(model), first.watching(policy):
            for part in plan.micro_batches:
                self._loss(rollout, context, terms, part)
        module = first_of_all_processes(first.name)
        raise PrecisionError(f"{what}: {explanation(weight, module, self.args.fp16)}.")

    # ---- Phases ---------------------------------------------------------------------------------------------------

    def plan(self, model: Any, rollout: RolloutBatch, max_rows: int, terms: StepTerms) -> StepPlan:
        """Assign the completions to processes and micro-batches; before the first pack, compare it with padding."""
        sizes, model = rollout.sizes(self.multiple), self.accelerator.unwrap_model(model)

        if not self.scorer.settled(model):
            with self.scorer.without_gradients(model):
                self.scorer.check(model, self._token_rows(rollout), everywhere=True)
        form = "padded" if any(rollout.gaps) else self.scorer.form(model)
        self._say_oversized(sizes, form)
        layout = MicroBatchLayout(max_rows, self.limits.tokens, form, self.cost, self.args.unit_rows)
        rows = rollout.contributing_rows if terms.skip_zeros else range(len(rollout))
        micro_batches = plan_step(self.accelerator, sizes, rows, layout)
        return StepPlan(micro_batches, StepWork.of(sizes, rows, micro_batches, form))

    def _token_rows(self, rollout: RolloutBatch) -> TokenRows:
        return rollout.token_rows(self.accelerator.device, self.images(rollout.columns))

    def measure(
        self,
        model: Any,
        rollout: RolloutBatch,
        plan: StepPlan,
        terms: StepTerms,
        gradients: NativeGradients | None = None,
    ) -> StepContext:
        """Everything step-wide that the loss of a micro-batch needs, before the first forward."""

        def measured(part: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, RouterOutput | None]:
            batch, tokens = self.collate(rollout, part.rows)
            with self.scorer.without_gradients(self.accelerator.unwrap_model(model)):
                _, entropies, router = terms.score(batch, tokens)
            return entropies, loss_mask(batch), router

        guard = functools.partial(out_of_memory_on_all, self.accelerator, gradients.discard if gradients else None)
        return measure_step(
            rollout,
            plan.micro_batches,
            measured,
            StepMetrics(self.accelerator.device),
            terms.top_entropy_quantile,
            terms.router,
            terms.experts_per_token,
            guard,
        )

    def collate(self, rollout: RolloutBatch, rows: Any) -> tuple[Inputs, TokenRows]:
        """Completions as TRL's loss takes them, padded, and their tokens without padding; on the device."""
        some = rollout.select(rows)
        batch = to_device(some.collate(self.pad_token_id, self.multiple), self.accelerator.device)
        batch["attention_mask"] = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        return batch, self._token_rows(some)

    def tokens_of(self, inputs: Inputs) -> TokenRows:
        """The tokens of a padded batch without padding, also of one that the user has made or changed."""
        rows = inputs[STEP_PART].rows_of(inputs) if STEP_PART in inputs else None
        if rows is None:
            ids, mask = (torch.cat([inputs[f"prompt_{n}"], inputs[f"completion_{n}"]], dim=1) for n in ("ids", "mask"))
            rows = TokenRows.of_padded(ids, mask, inputs["completion_ids"].size(1), self.images(inputs))
        return rows

    def as_step(self, inputs: Inputs, num_generations: int, terms: StepTerms) -> Inputs:
        """A scored batch that is no part of a step (a user's own call), with itself as its step."""
        rows, entropies = self.tokens_of(inputs), None
        if (quantile := terms.top_entropy_quantile) < 1.0:
            with torch.no_grad():
                _, entropies, _ = terms.score(inputs, rows)
        top_k = terms.experts_per_token
        return whole_step(inputs, rows, self.accelerator.device, top_k, num_generations, quantile, entropies)

    def _loss(self, rollout: RolloutBatch, context: StepContext, terms: StepTerms, part: MicroBatch) -> torch.Tensor:
        inputs, tokens = self.collate(rollout, part.rows)
        if terms.images_for_trl and tokens.images is not None:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            inputs |= tokens.images.as_trl(ids, tokens.prompts_B, inputs["prompt_ids"].size(1))
        keep = None
        if context.entropy_keep is not None:
            keep = context.keep_mask(part.rows, inputs["completion_mask"].size(1), self.accelerator.device)
        groups, padded = [rollout.groups[row] for row in part.rows], Unchanged(*(inputs[name] for name in TOKENS))
        inputs[STEP_PART] = step_part = StepPart(context, part.weight, groups, tokens, padded, keep)
        steps = self.args.geometry.steps_per_rollout if terms.training else None
        items = step_part.items_in_batch(self.accelerator.num_processes, steps)
        inputs["num_items_in_batch"] = torch.tensor(items, device=self.accelerator.device)
        loss = terms.loss_of(inputs)
        loss = loss if part.weight else loss * 0.0  # a subclass's own term does not know the weight
        context.metrics.add_total("loss", loss, 1.0)
        return loss

    def _gradients(self, model: Any) -> NativeGradients | None:
        """How this step's gradients are added up; None where the engine does it."""
        if self.scorer.sharded:
            return None
        names, parameters = zip(*self.accelerator.unwrap_model(model).named_parameters())
        if not self.args.bitwise_invariant:
            return NativeGradients(parameters, self.accelerator)
        return FixedPointGradients(parameters, self.accelerator, names)

    # ---- Memory ---------------------------------------------------------------------------------------------------

    def _say_oversized(self, sizes: StepSizes, form: Form) -> None:
        budget = self.limits.tokens
        if budget is None or self._said_oversized or not (large := oversized(sizes, budget, form)):
            return
        self._said_oversized = True
        tokens = max(sizes.tokens([row], form) for row in large)
        logger.warning(
            f"{len(large)} completion(s) of this step are larger with their prompt than micro_batch_tokens={budget} "
            f"(up to {tokens} tokens) and run alone, over the budget; max_completion_length bounds them."
        )

    def _shrink(self, model: Any, rollout: RolloutBatch, plan: StepPlan, reason: str, attempt: int) -> None:
        """Lower the limits after a step that did not fit.

        Raises:
            MemoryShortageError: nothing smaller is left.
        """
        sizes = rollout.sizes(self.multiple)
        unit_rows, device = self.args.unit_rows, self.accelerator.device
        if unit_rows is not None and attempt:
            raise MemoryShortageError(
                f"the step ran out of memory twice ({reason}) with canonical units of {unit_rows} completion(s), which "
                "bitwise_invariant=True does not cut. Helpful: a smaller canonical_unit_size (it belongs to what the "
                "run means), gradient_checkpointing=True, a smaller max_completion_length."
            )
        form = self.scorer.form(model)
        rows = max(len(part.rows) for part in plan.micro_batches)
        tokens = max(sizes.tokens(part.rows, form) for part in plan.micro_batches)
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


def log_step(context: StepContext, plan: StepPlan, seconds: dict[str, float]) -> dict[str, float]:
    """The values of a step for the logs, the same on every process; one reduction.

    Args:
        seconds: of this process, by phase.

    Returns:
        By name; "loss" is among them.
    """
    plan.work.add_to(context.metrics)
    values = reduced(context)
    values |= plan.work.logged(values, seconds.get("window", 0.0))
    return values | {f"time/{name}": value for name, value in seconds.items()}


def reduced(context: StepContext) -> dict[str, float]:
    """The metered values of a step or an evaluation, the same on every process."""
    return {"loss": math.nan} | context.metrics.reduce()
