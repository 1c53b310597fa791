"""Plans an optimizer step and runs its micro-batches; smaller ones where memory runs out.

Differs from the Trainer's accumulation: the whole step is one call, so its denominators are known before the first
forward, and the number of micro-batches may differ between processes. `StepPlanner` owns the limits of micro-batches
and plans attempts with them; `training_step` runs them.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache

from ..algorithms.keyed_random import DROPOUT_STREAM, derive_key
from ..batching.micro_batches import MicroBatch, MicroBatchLayout, TokenCost, plan_step
from ..errors import MemoryShortageError, PrecisionError, counted
from ..forward.columns import ROW
from ..forward.dropout import is_keyed
from ..forward.lm_head import LogProbs
from ..forward.rows import TokenRows
from ..forward.runner import ForwardRunner
from ..precision.non_finite import explanation, first_module
from ..rollouts.batch import RolloutBatch
from ..rollouts.source import Rollouts
from ..runtime.attributes import temporarily_set
from ..runtime.collectives import any_process, gather_lists, max_over_processes, raise_on_all, uneven_collectives
from ..runtime.messages import logger
from ..runtime.out_of_memory import MicroBatchLimits, StepOutOfMemory, is_out_of_memory, shortage_of_one
from ..runtime.transfer import to_device
from ..view import TrainerView
from .cut_completion import CutCompletion
from .gradients import FixedPointGradients, NativeGradients, accumulating, refuse_gradient_hooks
from .inputs import LossInputs, loss_columns
from .loss import assemble_loss
from .record import StepRecord
from .settings import StepSettings, loss_config_of, step_settings_of
from .statistics import MicroBatchStatistics, StepContext, StepMetrics, StepPlan, count_step, loss_mask, set_statistics


@dataclass
class Attempt:
    """One run through the micro-batches of a step, or of an evaluation, on this process."""

    model: Any  # as the loop calls it
    rollout: RolloutBatch  # the completions of the step, those of all processes
    settings: StepSettings
    number: int  # of the step, from 1
    planner: "StepPlanner"
    run: Callable[[LossInputs], torch.Tensor]  # computes a micro-batch's part of the loss
    plan: StepPlan
    forwards: ForwardRunner
    gradients: NativeGradients | None  # None where an engine (FSDP, DeepSpeed) adds them up
    record: StepRecord | None  # where the step is run again
    shortage: str | None = None  # why memory ran out, on this process or another
    step: StepContext = field(init=False)  # set by `measure`
    current: LossInputs | None = None  # the micro-batch that runs

    @functools.cached_property
    def dropout(self) -> int | None:
        """The key of the step's dropout; None without dropout."""
        if not self.settings.training or not any(map(is_keyed, self.model.modules())):
            return None
        return derive_key(self.forwards.args.seed, DROPOUT_STREAM, self.number)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, forwards run in the model's form; an error or a lack of memory ends it on all processes."""
        forwards, sharded, meets = self.forwards, self.forwards.sharded, self.forwards.collective_forward
        fillers = "a process may repeat micro-batches with weight zero, to run as many as the others"
        refused = fillers if self.settings.equal_counts and not sharded else None
        uneven = uneven_collectives(forwards.accelerator, self._adds_nothing, others_refused=refused)
        phase, known = self.planner.rollouts.worker.clock.phase("train"), temporarily_set(self.planner, running=self)
        try:
            with phase, forwards.in_form_of(self.model), raise_on_all("a step", meets, again=True), known, uneven:
                yield
        except RuntimeError as error:
            if meets and is_out_of_memory(error):
                raise shortage_of_one(str(error), forwards.args.sequence_parallel_size) from None
            raise
        except StepOutOfMemory as shortage:
            self.shortage = str(shortage)
            if self.gradients is not None:
                self.gradients.discard()
        finally:
            self.current = None

    def measure(self, model: Any) -> None:
        """Count the step, and measure what its loss needs, before any gradient."""
        settings, accelerator = self.settings, self.forwards.accelerator
        metrics = StepMetrics(accelerator.device, counted=self.forwards.is_first)
        self.step = step = count_step(self.rollout, metrics)
        step.record = self.record.add if self.record is not None and self.forwards.is_first else None
        of_step = settings.top_entropy_quantile < 1.0 or settings.router
        pieces = [part for part in self.plan.micro_batches if part.piece is not None and part.weight]
        together = self.rollout.several and (settings.equal_counts or self.forwards.sharded)
        # where a forward may be a collective, every process runs all of its micro-batches
        parts = self.plan.micro_batches if of_step or (together and any_process(bool(pieces))) else pieces
        if not parts:
            return
        measured: list[MicroBatchStatistics] = []
        with self.forwards.without_gradients(self.planner.view.policy):
            for micro_batch in self.micro_batches(parts):
                scores = self.forwards.micro_batch_log_probs(
                    model, micro_batch.rows, settings.router, micro_batch.padded
                )
                # a column may be a part of the micro-batch's buffer, which would stay on the device with it
                mask_S = loss_mask(micro_batch.columns)[micro_batch.tokens].clone()
                experts = None if scores.router is None else scores.router.statistics()
                measured.append(MicroBatchStatistics(micro_batch.part, scores.entropies_S, mask_S, experts))
                if micro_batch.cut is not None:
                    micro_batch.cut.scores[micro_batch.first_row] = scores.logps_S, scores.entropies_S
        if of_step:
            set_statistics(step, measured, settings.top_entropy_quantile)
        for micro_batch in self.micro_batches([MicroBatch((place,)) for place in step.cuts]):
            step.cuts[micro_batch.part.rows[0]].derive(functools.partial(self._whole_loss, micro_batch))

    def _whole_loss(self, micro_batch: LossInputs, logps_S: torch.Tensor, entropies_S: torch.Tensor) -> torch.Tensor:
        """The loss of a completion that is cut, without its routers' term, which the pieces add."""
        cfg = replace(loss_config_of(self.planner.view), router_coefficient=None)
        return assemble_loss(cfg, micro_batch, LogProbs(logps_S, entropies_S, None))

    def micro_batches(self, parts: Sequence[MicroBatch] | None = None) -> Iterator[LossInputs]:
        for part in self.plan.micro_batches if parts is None else parts:
            selected, rows, padded = self.rollout.select(part.rows), self.token_rows(part.rows), dict[str, Any]()
            if self.settings.in_trl_form:
                padded = selected.as_trl(self.planner.view.tokenizer.pad_token_id, self.forwards.multiple)
                padded["attention_mask"] = torch.cat([padded["prompt_mask"], padded["completion_mask"]], dim=1)
                padded[ROW] = torch.tensor(part.rows)
            values = loss_columns(selected.columns, rows), padded
            columns, padded = to_device(values, self.forwards.accelerator.device)
            of_step = self.step, part, selected.groups
            self.current = LossInputs(*of_step, rows, columns, padded)
            if (piece := part.piece) is not None:
                starts = [0, *itertools.accumulate(rows.scored_B)]
                cut = self.step.cuts.setdefault(part.rows[0], CutCompletion()) if part.weight else CutCompletion()
                tokens = slice(starts[piece.start], starts[piece.stop])
                self.current = LossInputs(*of_step, rows.part(piece), columns, cut=cut, tokens=tokens)
            yield self.current

    def token_rows(self, places: Sequence[int]) -> TokenRows:
        """The tokens of these completions of the step, which may come in any order and repeatedly."""
        selected = self.rollout.select(places)
        images = self.planner.rollouts.images.of_batch(selected.columns)
        return self.with_dropout(selected.token_rows(images, self.rollout.group_lengths), places)

    def with_dropout(self, rows: TokenRows, places: Sequence[int]) -> TokenRows:
        if self.dropout is None:
            return rows
        return rows.with_dropout(self.dropout, [self.rollout.groups[place] for place in places], places)

    def _adds_nothing(self) -> bool:
        return self.current is not None and not self.current.part.weight

    def counts(self, part: MicroBatch) -> bool:
        """Whether parameters that a micro-batch uses take part; where nothing adds, its filler stands for the step."""
        return bool(part.weight) or not self.plan.rows

    def end(self, loss: float) -> None:
        """Raise a PrecisionError where the loss is not finite; fill the record of a rerun."""
        if not math.isfinite(loss):
            modules = [*self._first_modules().values()]
            cause = explanation(self.planner.view.policy, modules, self.forwards.args.fp16)
            raise PrecisionError(f"the loss of step {self.number} is {loss}: {cause}.")
        if self.record is not None:
            policy = self.planner.view.policy
            self.record.fill(self.rollout, self.plan, self.forwards, policy, self.run, self.run_again)

    def run_again(self, parts: Sequence[MicroBatch], run: Callable[[LossInputs], Any]) -> None:
        """Run the same step, perhaps cut differently, in the same form."""
        again = replace(self, plan=replace(self.plan, micro_batches=parts), gradients=None)
        again.step = self.step
        with self.planner.view.having({}), again.running():
            for micro_batch in again.micro_batches():
                run(micro_batch)
        if again.shortage is not None:
            raise MemoryShortageError(
                "the step fits into memory, and another run of it, for its record or to find what is not finite, does "
                f"not ({again.shortage})."
            )

    def check_gradient(self, norm: float | None) -> None:
        """Raise a PrecisionError where the norm of the step's gradient is not finite, on all processes together.

        The completions run one by one again, to find those that it comes from. In fp16 the loss scaler decides.
        """
        if self.record is not None:
            self.record.norm = norm
        # DeepSpeed reports such a norm as -1 or infinity
        if norm is None or 0 <= norm < math.inf or self.forwards.accelerator.mixed_precision == "fp16":
            return
        modules = self._first_modules(backward=True)
        cause = (
            "it is not seen at the output of a module, so it comes from a loss of your own, a hook on a gradient, or a "
            "sum or norm that overflows"
        )
        if modules:
            rows, prompts = [*modules], sorted({self.rollout.groups[row] for row in modules})
            cause = (
                f"it comes from the completions {rows} of the step (prompts {prompts} of the rollout batch), counted "
                f"from 0, and is first seen at the output of {modules[rows[0]]}; if that is the whole model, the loss "
                "is the cause. Look at the advantages and importance ratios there, and at a loss of your own"
            )
        raise PrecisionError(f"the norm of the gradient of step {self.number} is {norm}: {cause}.")

    def _first_modules(self, backward: bool = False) -> dict[int, str]:
        """Run the completions one by one again; by row of the step, the first module where one is not finite."""
        accelerator, (first, *_) = self.forwards.accelerator, self.plan.micro_batches
        parts = self.plan.alone()
        # where a forward or an override is a collective, every process runs as many
        parts += [MicroBatch(first.rows[:1], 0.0)] * (max_over_processes(len(parts)) - len(parts))
        first_by_row: list[tuple[int, str]] = []

        def look(micro_batch: LossInputs) -> None:
            with torch.set_grad_enabled(backward), first_module(self.planner.view.policy, backward) as names:
                loss = self.run(micro_batch)
                if backward:
                    accelerator.backward(loss)
            first_by_row.extend((micro_batch.part.rows[0], name) for name in names[:1])

        with temporarily_set(accelerator.gradient_state, sync_gradients=False):  # DeepSpeed would step
            self.run_again(parts, look)
        return dict(sorted(dict(gather_lists(first_by_row)).items()))  # of processes that share a row, the last one's


@dataclass
class StepPlanner:
    view: TrainerView
    rollouts: Rollouts
    cost: TokenCost  # by which groups are assigned to processes
    record: StepRecord | None = None  # of the step that is run again
    running: Attempt | None = None
    # of the step that ran last; a user's own `training_step` may run none
    check_gradient: Callable[[float | None], None] = lambda norm: None

    def __post_init__(self) -> None:
        self.forwards, self.limits = self.rollouts.worker.forwards, self.rollouts.limits  # those of training
        self.eval_limits = MicroBatchLimits(self.forwards.args.per_device_eval_batch_size, self.limits.tokens)

    def add_gradients(
        self, model: Any, rollout: RolloutBatch, watched: Callable[[Iterator[LossInputs]], Iterable[LossInputs]] = iter
    ) -> Attempt:
        """Run the micro-batches of a step, `watched` one by one; its gradient is in the parameters afterwards."""
        accelerator, collective = self.forwards.accelerator, self.forwards.collective_forward
        for attempt in self.attempts(model, rollout):  # smaller where memory runs out
            with attempt.running():
                attempt.measure(self.view.model)  # the denominators, before any forward with gradients
                sums = attempt.gradients, len(attempt.plan.micro_batches), collective
                with accumulating(accelerator, *sums) as backward:  # at its end one sum over the processes
                    for micro_batch in watched(attempt.micro_batches()):
                        with accelerator.accumulate(model):  # FSDP decides in the forward whether to reduce
                            backward(attempt.run(micro_batch), attempt.counts(micro_batch.part))
        return attempt

    def attempts(self, model: Any, rollout: RolloutBatch) -> Iterator[Attempt]:
        """Yield attempts, each with smaller micro-batches, until one fits into memory."""
        gradients, accelerator, metrics = None, self.forwards.accelerator, self.view.metrics
        settings = step_settings_of(self.view)
        if settings.training:
            refuse_gradient_hooks(model, self.forwards.sharded)
        if not self.forwards.sharded:  # else the engine adds them up
            kind = FixedPointGradients if self.forwards.args.bitwise_invariant else NativeGradients
            gradients = kind(accelerator.unwrap_model(model), accelerator)
        for number in itertools.count():
            logged = {mode: {name: [*values] for name, values in lists.items()} for mode, lists in metrics.items()}
            attempt = Attempt(
                model=model,
                rollout=rollout,
                settings=settings,
                number=self.view.state.global_step + 1,
                planner=self,
                run=functools.partial(self.view.loss_of, model),
                plan=self._planned(model, rollout, settings),
                forwards=self.forwards,
                gradients=gradients,
                record=self.record if settings.training else None,
            )
            self.check_gradient = attempt.check_gradient
            yield attempt
            if attempt.shortage is None:
                return
            for mode, lists in metrics.items():  # an override logs again
                lists.clear()
                lists.update(logged[mode])
            clear_device_cache(garbage_collection=True)
            self._shrink(attempt, number)

    def _planned(self, model: Any, rollout: RolloutBatch, settings: StepSettings) -> StepPlan:
        forwards = self.forwards
        limits = self.limits if settings.training else self.eval_limits
        form = "padded" if rollout.attended is not None else forwards.choice.form(model)
        batching, multiple = forwards.batching(model, form)
        layout = MicroBatchLayout(
            max_rows=limits.rows,
            max_tokens=limits.tokens,
            form=form,
            batching=batching,
            cost=self.cost,
            unit_rows=forwards.args.unit_rows,
            whole_groups=forwards.float32_weight_gradients and form != "padded",
            processes=forwards.groups,
            rank=forwards.group_number,
            equal_counts=forwards.sharded or settings.equal_counts,
        )
        sizes = rollout.sizes(multiple)
        rows = rollout.contributing_rows if settings.skip_zeros else range(len(rollout))
        return StepPlan(sizes, rows, plan_step(sizes, rows, layout), form)

    def _shrink(self, attempt: Attempt, number: int) -> None:
        unit_rows, plan, reason = self.forwards.args.unit_rows, attempt.plan, attempt.shortage
        limits, what = (self.limits, "a step") if attempt.settings.training else (self.eval_limits, "an evaluation")
        if unit_rows is not None:
            if number:
                raise MemoryShortageError(
                    f"{what} ran out of memory twice ({reason}) with canonical units of "
                    f"{counted(unit_rows, 'completion')}, "
                    "which bitwise_invariant=True does not cut. What helps: a smaller canonical_unit_size (it belongs "
                    "to what the run means), gradient_checkpointing=True, a smaller max_completion_length."
                )
            limits.failures += 1
            logger.warning(f"Out of memory in {what} ({reason}); its units run again after freeing memory.")
            return
        parts, sizes = plan.micro_batches, plan.sizes
        rows = max_over_processes(max(len(part.rows) for part in parts))
        cuttable = max_over_processes(max(sizes.forward_rows(part) * (part.weight > 0) for part in parts)) > 1
        tokens = max_over_processes(max(sizes.tokens(part.rows, plan.form, part.piece) for part in parts))
        allowed = limits.shrink(rows, tokens, what, cuttable)
        logger.warning(
            f"Out of memory in {what} ({reason}); it runs again with {allowed}, and so do all that follow. The result "
            "is the same."
        )
