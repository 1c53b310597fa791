"""A micro-batch for its forward and its loss, without padding, and the step that counts it.

Differs from TRL, where one padded dictionary serves both. It is made here too, but only for overrides (step.overrides).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batching.micro_batches import MicroBatch
from ..forward.columns import COLUMNS, COMPLETION_MASK, Column
from ..forward.rows import TokenRows, unpadded
from .cut_completion import CutCompletion
from .statistics import StepContext, StepMetrics

LENGTHS = "lengths"


@dataclass(frozen=True)
class LossInputs:
    step: StepContext
    part: MicroBatch  # the completions, by their rows of the step
    groups: Sequence[int]  # of each completion
    rows: TokenRows  # the tokens, without padding
    columns: dict[str, Any]  # on the device, those of `loss_columns`
    padded: dict[str, Any] = field(default_factory=dict)  # TRL's dictionary, where a user's overrides read it
    cut: CutCompletion | None = None  # of a piece
    tokens: slice = field(default_factory=lambda: slice(None))  # of a piece, among the tokens of its completion

    @property
    def first_row(self) -> int:
        """Of a piece, among the rows of its completion."""
        return 0 if self.part.piece is None else self.part.piece.start

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion."""
        return self.rows.by_completion(self.rows.scored_B)

    @property
    def metrics(self) -> StepMetrics:
        return self.step.metrics.of_weight(self.part.weight)

    @property
    def accumulation_steps(self) -> float:
        """The step's completions over the micro-batch's: TRL's divisor of a mean over the micro-batch."""
        whole, rest = divmod(self.step.counts.completions, len(self.groups))
        return whole + rest / len(self.groups) if rest else whole

    def sizes(self, args: Any) -> dict[str, Any]:
        """TRL's sizes of this micro-batch, by their names in `args`; the accumulation may be a fraction."""
        steps = self.accumulation_steps
        return {
            "gradient_accumulation_steps": steps,
            "steps_per_generation": steps * args.steps_per_generation,
            "per_device_train_batch_size": len(self.groups),
        }

    def add_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Add the loss to the logged one; returns it, or zero at weight zero."""
        loss = loss if self.part.weight else loss * 0.0  # a subclass's own term does not know the weight
        self.step.metrics.add_total("loss", loss)
        return loss


def loss_columns(columns: Mapping[str, Any], rows: TokenRows) -> dict[str, torch.Tensor]:
    """What the loss reads, by TRL's names, from columns of unpadded or padded completions; and `LENGTHS`, theirs.

    (S,) for the tokens of all completions, one after the other, or (B, 1).
    """
    lengths = rows.by_completion(rows.scored_B)
    of_loss = {LENGTHS: torch.tensor(lengths), COMPLETION_MASK: torch.ones(sum(lengths), dtype=torch.long)}
    for name, kind in COLUMNS.items():
        column = columns.get(name) if kind.loss else None
        if isinstance(column, torch.Tensor):
            of_loss[name] = _of_rows(column, kind, lengths)
        elif column is not None:
            of_loss[name] = column.values if column.lengths == lengths else unpadded(column, lengths)
    return {name: values.long() if values.dtype == torch.bool else values for name, values in of_loss.items()}


def _of_rows(values: torch.Tensor, kind: Column, lengths: Sequence[int]) -> torch.Tensor:
    """Values of each row, (B, 1), or of its tokens, (S,), from a tensor that broadcasts to (B, T)."""
    rows, longest = len(lengths), max(lengths, default=0)
    values_BT = (values if values.dim() > 1 else values.reshape(-1, 1)).expand(rows, -1)
    if values_BT.size(1) == 1:
        if kind.of_rows:
            return values_BT
        values_BT = values_BT.expand(rows, longest)
    missing = max(longest - values_BT.size(1), 0)  # of an override that made completions longer
    return unpadded(torch.nn.functional.pad(values_BT, (0, missing), value=kind.fill or 0), lengths)
