"""The rollout batch: scored completions in global order, the same on every process, unpadded.

Differs from TRL, where each process holds its own padded part. Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..batching.micro_batches import StepSizes
from ..batching.sizes import group_numbers
from ..compat import IMAGE_ARGUMENTS
from ..runtime.collectives import ragged_gather

# fields of a model that takes images: which row of the data set a completion is for, by which they are read again; or
# all images of the row, packed, where tools or environments bring some
ROW_NUMBER, ROW_IMAGES = "row_number", "row_images"
_PROMPT_FIELDS = ("prompt_ids", "prompt_mask")
_SEQUENCE_FIELDS = ("importance_sampling_ratio", "advantages", ROW_NUMBER)  # may be one value per sequence


def padded(rows: Sequence[torch.Tensor], value: float, side: str, multiple: int | None = None) -> torch.Tensor:
    """Rows (T,) of any length as one (B, T), filled up on one side to the longest, or to the next multiple."""
    batch_BT = pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)
    more = -batch_BT.size(1) % (multiple or 1)
    return torch.nn.functional.pad(batch_BT, (more, 0) if side == "left" else (0, more), value=value)


@dataclass
class Rollout:
    """Scored completions (a rollout batch, or a step of it) in global order, the same on every process, unpadded.

    Attributes:
        fields: from TRL's names (`prompt_ids`, `completion_ids`, `completion_mask`, `advantages`, ...) to one 1-D
            tensor per completion. `completion_mask` is 0 on a truncated completion that `mask_truncated_completions`
            leaves out.
        groups: which group of the rollout batch each completion belongs to.
    """

    fields: dict[str, list[torch.Tensor]]
    groups: Sequence[int]

    @classmethod
    def of_groups(cls, fields: dict[str, list[torch.Tensor]], num_generations: int) -> Rollout:
        """A rollout batch, which is whole groups."""
        return cls(fields, group_numbers(len(fields["completion_ids"]), num_generations))

    def __len__(self) -> int:
        return len(self.fields["completion_ids"])

    def select(self, rows: Sequence[int]) -> Rollout:
        """The completions at `rows`."""
        fields = {name: [values[i] for i in rows] for name, values in self.fields.items()}
        return Rollout(fields, [self.groups[i] for i in rows])

    def sizes(self, multiple: int | None = None) -> StepSizes:
        """Tokens of the prompts and completions; a completion that is masked out has none.

        Where an environment has given the rows of a group different prompts, every row counts as a group of its own.
        """
        ids, rows, groups = self.fields["prompt_ids"], range(len(self)), self.groups
        shared = all(torch.equal(ids[row - 1], ids[row]) for row in rows[1:] if groups[row - 1] == groups[row])
        prompts, completions = (
            [int(mask.sum()) for mask in self.fields[name]] for name in ("prompt_mask", "completion_mask")
        )
        return StepSizes(groups if shared else rows, prompts, completions, multiple or 1)

    def loss_mask(self, row: int) -> torch.Tensor:
        """1 on the tokens of completion `row` that carry loss."""
        mask = self.fields["completion_mask"][row]
        return mask * self.fields["tool_mask"][row] if "tool_mask" in self.fields else mask

    def collate(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> dict[str, torch.Tensor]:
        """Pad to a batch, prompts on the left and completions on the right, to the longest row in it."""
        batch = {}
        for name, values in self.fields.items():
            # a ratio of 1 is no correction; the VESPO weight sums its logarithm over the padding too
            neutral = 1 if name in ("tool_mask", "importance_sampling_ratio") else 0
            fill = pad_token_id if name.endswith("_ids") else neutral
            if name in _SEQUENCE_FIELDS and all(v.numel() == 1 for v in values):
                batch[name] = torch.stack(values)
            else:
                side = "left" if name in _PROMPT_FIELDS else "right"
                batch[name] = padded(values, fill, side, pad_to_multiple_of)
        if batch["advantages"].size(1) == 1:  # one per completion; TRL lets a subclass give one per token
            batch["advantages"] = batch["advantages"].view(-1)
        return batch


def contributing_rows(rollout: Rollout) -> list[int]:
    """Rows with an advantage other than zero and a token that carries loss; the others add exactly nothing.

    A row whose advantage is not a number counts, so that what is wrong with it shows in the loss.
    """
    advantages = rollout.fields["advantages"]
    return [
        row for row, values in enumerate(advantages) if bool((values != 0).any()) and bool(rollout.loss_mask(row).any())
    ]


def gather_rollout(scored: dict[str, Any], rows: int, num_generations: int) -> Rollout:
    """Gather the rows of all processes into the rollout batch that every process holds.

    Args:
        scored: what `_generate_and_score_completions` returned for this process's rows, padded; tensors with one row
            per completion are kept, (B,), (B, 1) or (B, T), but for those of images, which every forward makes anew.
        rows: rows of this process that count (0 without prompts), whole groups.
    """
    prompt_lengths = scored["prompt_mask"].sum(1)
    # a completion that is masked out keeps one column, because a scored width of zero is no slice
    lengths = scored["completion_mask"].sum(1).clamp(min=1)
    fields: dict[str, list[torch.Tensor]] = {}
    for name in sorted(scored.keys() - {*IMAGE_ARGUMENTS}):
        value = scored[name]
        if not isinstance(value, torch.Tensor) or value.dim() not in (1, 2) or value.size(0) != len(lengths):
            continue
        if name in _PROMPT_FIELDS:
            parts = [row[row.size(0) - n :] for row, n in zip(value, prompt_lengths.tolist())]
        elif value.dim() == 1 or (value.size(1) == 1 and name in _SEQUENCE_FIELDS):
            parts = list(value.view(-1, 1))
        else:
            parts = [row[:n] for row, n in zip(value, lengths.tolist())]
        fields[name] = gather_parts(parts, rows)
    return Rollout.of_groups(fields, num_generations)


def gather_parts(parts: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """Tensors (N,) of any length of all processes, of which the first `rows` of this one count."""
    lengths = torch.tensor([p.numel() for p in parts], device=parts[0].device)
    flat = torch.cat(parts[:rows]) if rows else parts[0][:0]
    # kept on the CPU: a rollout is many short rows, and a micro-batch moves to the device as a whole
    return list(ragged_gather(flat).cpu().split(ragged_gather(lengths, rows).tolist()))
