"""One run through the micro-batches of a step: counted, collated one by one, their gradients added up.

Differs from the Trainer's accumulation: the denominators are known before the first forward. `OptimizerStep` plans it,
`training_step` runs it, and where memory ends, the next one with smaller micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

from ..batching.micro_batches import TokenCost
from ..config import GRPOConfig
from ..forward.rows import TokenRows, Unchanged, padded_ids_and_mask
from ..forward.scorer import Scorer
from ..rollouts.batch import RolloutBatch
from ..rollouts.images import ImageSource
from ..runtime.clock import PhaseClock
from ..runtime.out_of_memory import StepOutOfMemory
from .gradients import Accumulation, NativeGradients, accumulating, out_of_memory_on_all
from .loss import loss_mask
from .metrics import StepMetrics, StepWork
from .plan import MicroBatch
from .statistics import (
    STEP_PART,
    TOKENS,
    Measured,
    StepContext,
    StepPart,
    count_step,
    set_statistics,
)
from .terms import StepTerms

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
    scorer: Scorer
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
        context: what a micro-batch needs to know of the step, once `measure` has run.
        shortage: why memory ran out, on this process or another; None where it sufficed.
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
            with self.parts.clock.phase("train"), self.parts.scorer.running(self.model):
                yield
        except StepOutOfMemory as shortage:
            self.shortage = str(shortage)

    def measure(self, model: Any) -> None:
        """Find everything step-wide that the loss of a micro-batch needs, before the first forward with gradients.

        Args:
            model: scores the completions where a term needs a statistic of the whole step.
        """
        parts, terms = self.parts, self.terms
        self.context = count_step(self.rollout, StepMetrics(parts.accelerator.device), terms.experts_per_token)
        if not terms.needs_statistics:
            return
        measured: list[Measured] = []
        discard = None if self.gradients is None else self.gradients.discard
        plain = parts.scorer.without_gradients(parts.accelerator.unwrap_model(self.model))
        with out_of_memory_on_all(parts.accelerator, discard), plain:
            for part in self.plan:
                batch, rows = parts.collate(self.rollout, part.rows, terms.training)
                scores = parts.scorer.score_inputs(model, batch, rows, terms.router, terms.log_probs)
                measured.append(Measured.of(part, scores, loss_mask(batch), terms.experts_per_token))
        set_statistics(self.context, measured, terms.top_entropy_quantile)

    def accumulating(self) -> AbstractContextManager[Accumulation]:
        """A context for the backward passes; afterwards `.grad` is that of the step. See `backward.accumulating`."""
        return accumulating(self.parts.accelerator, self.model, self.gradients, len(self.plan))

    def micro_batches(self) -> Iterator[Inputs]:
        """The micro-batches of this process, once the step is measured."""
        return map(self.micro_batch, self.plan)

    def micro_batch(self, part: MicroBatch) -> Inputs:
        """A micro-batch as TRL's loss takes it; its place in the step travels in it."""
        device, training = self.parts.accelerator.device, self.terms.training
        inputs, rows = self.parts.collate(self.rollout, part.rows, training)
        if self.terms.own_loss and rows.images is not None:
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
        """The values of the step for the logs, the same on every process but for its seconds; one reduction."""
        seconds = self.parts.clock.take()
        self.work.add_to(self.context.metrics)
        values = self.context.metrics.reduce()
        values |= self.work.logged(values, seconds.get("train", 0.0))
        return values | {f"time/{name}": value for name, value in seconds.items()}
