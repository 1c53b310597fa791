"""A user's `compute_loss`, `_compute_loss` or log-probabilities, with TRL's dictionary or TRL's padded tensors.

TRL's methods are functions of their arguments here: the tokens and masks that they are given count, and the column
`grpo_ext_row` says to which completions of the step they belong. Denominators are those of the step. Outside a step a
dictionary is a whole step.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..batching.micro_batches import MicroBatch
from ..batching.sizes import group_numbers
from ..errors import ConfigError
from ..forward.columns import COLUMNS, ROW, TrlBatch
from ..forward.images import RowImages
from ..forward.rows import TokenRows
from ..forward.runner import ForwardLimits, TrlLogProbs, known_of, padded_ids_and_mask
from ..runtime.attributes import temporarily_set
from ..runtime.transfer import to_device
from ..view import TrainerView
from .inputs import LossInputs, loss_columns
from .loss import active_tokens, assemble_loss
from .optimizer_step import Attempt, StepPlanner
from .settings import loss_config_of
from .statistics import MicroBatchStatistics, StepContext, StepMetrics, loss_mask, set_statistics, step_counts


@dataclass
class LossOverrides:
    view: TrainerView
    planner: StepPlanner  # which knows the step that runs

    def dictionary(self, micro_batch: LossInputs) -> TrlBatch:
        """TRL's dictionary of a micro-batch."""
        view, counts, images = self.view, micro_batch.step.counts, micro_batch.rows.images
        # TRL's loss divides `num_items_in_batch` by the processes, and in training by the steps of a rollout batch
        repeats = view.accelerator.num_processes * (view.geometry.steps_per_rollout if view.model.training else 1)
        items = torch.tensor(float((counts.items or counts.tokens) * repeats), device=view.accelerator.device)
        inputs = micro_batch.padded | {"num_items_in_batch": items}
        if images is not None:
            ids, _ = padded_ids_and_mask(inputs)
            inputs |= images.as_trl(ids)
        return inputs

    def loss(self, model: Any, inputs: TrlBatch) -> torch.Tensor:
        """What a dictionary adds to the loss of the step; outside a step it is a whole step."""
        with_router, attempt = self.view.aux_loss_enabled, self.planner.running
        micro_batch = self._of_own_step(inputs) if attempt is None else self._of_step(attempt, inputs)
        forwards, rows = self.planner.forwards, micro_batch.rows
        if attempt is None:  # one process may call this alone
            scores = forwards.micro_batch_log_probs(model, rows, with_router, inputs, alone=True)
        else:
            with temporarily_set(attempt, current=micro_batch):  # whose rows a user's log-probabilities are given
                scores = forwards.micro_batch_log_probs(model, rows, with_router, inputs)
        if attempt is None and (quantile := self.view.top_entropy_quantile) < 1.0:
            mask_S = loss_mask(micro_batch.columns)
            measured = MicroBatchStatistics(micro_batch.part, scores.entropies_S.detach(), mask_S)
            set_statistics(micro_batch.step, [measured], quantile)
        return assemble_loss(loss_config_of(self.view), micro_batch, scores)

    def log_probs(
        self,
        has_images: bool,
        model: Any,
        ids_BL: torch.Tensor,
        mask_BL: torch.Tensor,
        width: int,
        batch_size: int | None,
        with_entropy: bool,
        with_router: bool,
    ) -> TrlLogProbs | None:
        """What `_get_per_token_logps_and_entropies` returns for padded tokens (B, L).

        None for images that this trainer did not prepare, so that TRL's method serves them.
        """
        running, (images, limits) = self.planner.running, known_of(ids_BL)
        rows = TokenRows.of_padded(ids_BL, mask_BL, width, images)
        known = None if running is None or running.current is None else running.current.rows
        if known is not None and rows.same_tokens(known):
            rows = known  # with its images, and what else the step knows of them
        elif has_images and rows.images is None:
            return None
        else:
            name = "_get_per_token_logps_and_entropies"
            self.view.args.replay.refuse_other_tokens(f"{name} was called with other tensors than it was given")
        limits = limits or ForwardLimits(batch_size)
        return self.planner.forwards.trl_log_probs(model, rows, limits, width, with_entropy, with_router)

    def entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, quantile: float) -> torch.Tensor | None:
        """The tokens above the threshold of the step, for a loss that asks TRL's method; None outside a step."""
        if self.planner.running is None:
            return None
        threshold, share = self.planner.running.step.entropy_threshold, self.view.top_entropy_quantile
        if threshold is None or not math.isclose(quantile, 1 - share):
            raise ConfigError(
                f"get_high_entropy_mask was called with the quantile {quantile:g}, and top_entropy_quantile={share:g}: "
                f"the threshold of a step is measured for {1 - share:g} alone, and that of a micro-batch would depend "
                f"on the split. Set top_entropy_quantile={1 - quantile:g}."
            )
        return active_tokens(mask, entropies, threshold).bool()

    def _of_step(self, attempt: Attempt, inputs: TrlBatch) -> LossInputs:
        """Some rows of the step that runs, with the tokens and masks that they are given."""
        current, rollout = attempt.current, attempt.rollout
        assert current is not None
        if ROW not in inputs:
            raise ConfigError(
                f"the inputs of _compute_loss have no column {ROW!r}, which says to which completions of the step the "
                "rows belong; pass on the column that your override was given, with the same rows as the others."
            )
        places: list[int] = inputs[ROW].tolist()
        known = current.rows if places == [*current.part.rows] else attempt.token_rows(places)
        groups, columns = [rollout.groups[place] for place in places], dict(inputs)
        rows = self._given_rows(inputs, known.images)
        if rows.same_tokens(known):
            rows = known
            whole = rollout.select(places).columns
            columns |= {n: whole[n] for n, kind in COLUMNS.items() if n in whole and kind.loss and not kind.trl}
        else:
            self._refuse_with_replay()
            pairs = zip(rows.same_text, itertools.pairwise(groups), strict=True)
            rows = replace(rows, same_text=[same and group == before for same, (before, group) in pairs])
            rows = attempt.with_dropout(rows, places)
        part = MicroBatch(tuple(places), current.part.weight)
        return replace(current, part=part, groups=groups, rows=rows, columns=self._columns(columns, rows))

    def _columns(self, columns: TrlBatch, rows: TokenRows) -> dict[str, Any]:
        return to_device(loss_columns(columns, rows), self.view.accelerator.device)

    def _given_rows(self, inputs: TrlBatch, images: RowImages | None) -> TokenRows:
        return TokenRows.of_padded(*padded_ids_and_mask(inputs), inputs["completion_ids"].size(1), images)

    def _refuse_with_replay(self) -> None:
        self.view.args.replay.refuse_other_tokens(
            "an override of compute_loss or _compute_loss passes on other tokens or masks than it was given"
        )

    def _of_own_step(self, inputs: TrlBatch) -> LossInputs:
        """A batch of the user's own as a step; its groups are whole, from its first row on."""
        self._refuse_with_replay()
        mask, images = loss_mask(inputs), self.planner.rollouts.images.of_batch(inputs)
        whole, groups = MicroBatch(tuple(range(len(mask)))), group_numbers(len(mask), self.view.group_size)
        metrics, counts = StepMetrics(self.view.accelerator.device), step_counts(mask.sum(1).tolist(), groups)
        rows = self._given_rows(inputs, images)
        return LossInputs(StepContext(counts, metrics), whole, groups, rows, self._columns(inputs, rows))
