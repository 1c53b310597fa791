"""The columns of completions, in one table, and rows of any length, which hold one column of some completions.

Differs from TRL, where each quantity is a list or a padded tensor that its readers know by name. Transcripts record
columns, `join` sends them, a step selects rows of them, and forwards, the loss and TRL's dictionary take theirs.
Shapes: B rows, N values of all rows, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from .routing import BY_ROUTER

PROMPT_IDS, PROMPT_MASK, COMPLETION_IDS = "prompt_ids", "prompt_mask", "completion_ids"
COMPLETION_MASK, TOOL_MASK, ADVANTAGES = "completion_mask", "tool_mask", "advantages"
OLD_LOGPS, SAMPLING_LOGPS, RATIO = "old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"
TEACHER_LOGPS = "teacher_per_token_logps"  # TRL's dictionary has it too, so that overrides pass it on
SAMPLER_LOGPS, KEPT_COUNTS, KEPT_IDS, EXPERTS = "sampler_logps", "kept_counts", "kept_ids", "experts"
ROW_IMAGES, FURTHER_ROWS, CONTEXT_IDS = "row_images", "further_rows", "context_ids"
# never in a rollout batch, where columns of a user may have any name
KEPT_MASS, ATTENDED, DROPOUT = "grpo_ext_kept_mass", "grpo_ext_attended", "grpo_ext_dropout"
ROW = "grpo_ext_row"  # the place of a completion in the step, or the rows of a turn, in dictionaries for users
# columns by the model that scores, a field of `worker.Models`
MODEL_LOGPS = {"policy": OLD_LOGPS, "reference": "ref_per_token_logps", "teacher": TEACHER_LOGPS}


@dataclass(frozen=True)
class Column:
    # what a row has a value for: tokens of the prompt, of the completion or of both (in each row of a completion that
    # has several), ids that the completion's tokens were sampled from, its further rows, their ids, or the row itself
    extent: Literal["prompt", "completion", "both", "kept", "further", "context", "row"]
    # in memory, between processes and in checkpoints; None: as it was made. A mask (bool) that a process, or a user's
    # override, leaves out is 1 on all tokens
    dtype: torch.dtype | None = None
    fill: float | None = 0.0  # of padding in TRL's dictionary; None: the padding token
    neutral: float = 0.0  # of tokens of tools and environments; unknown floats of the model's tokens are NaN
    trl: bool = True  # in TRL's dictionary
    loss: bool = False  # read by the loss
    of_rows: bool = False  # a row may have one value instead of one for each token


COLUMNS: dict[str, Column] = {
    PROMPT_IDS: Column("prompt", torch.int32, fill=None),
    PROMPT_MASK: Column("prompt", torch.bool),  # 1 where attention sees the token
    COMPLETION_IDS: Column("completion", torch.int32, fill=None),
    COMPLETION_MASK: Column("completion", torch.bool, loss=True),  # as `prompt_mask`
    # 0 on tokens of tools and environments, which carry no loss
    TOOL_MASK: Column("completion", torch.bool, fill=1, loss=True),
    ADVANTAGES: Column("completion", loss=True, of_rows=True),
    # log-probabilities of the policy that sampled, the reference, the teacher, and the inference engine
    **{name: Column("completion", loss=True) for name in (*MODEL_LOGPS.values(), SAMPLING_LOGPS)},
    # of the policy to the engine. 1 corrects nothing; the VESPO weight sums its logarithm over the padding too
    RATIO: Column("completion", fill=1, loss=True, of_rows=True),
    # what the sampler recorded: log-probabilities after every filter, and the probability that the filters had kept
    SAMPLER_LOGPS: Column("completion", trl=False, loss=True),
    KEPT_MASS: Column("completion", neutral=1, trl=False),
    # ids of each token. 0: the whole vocabulary; -m: all but the m-th suppressed set (forward.sampling_masks)
    KEPT_COUNTS: Column("completion", torch.int32, trl=False),
    KEPT_IDS: Column("kept", torch.int32, trl=False),
    EXPERTS: Column("both", neutral=BY_ROUTER, trl=False),  # (N, C), to replay (forward.routing)
    # of a model that takes images, the bytes of a file with all that a completion shows; equal ones share one object
    ROW_IMAGES: Column("row"),
    # of completions of several rows: four numbers for each further row, and what its context has that no earlier row
    # has (forward.further_rows)
    FURTHER_ROWS: Column("further", torch.int32, trl=False),
    CONTEXT_IDS: Column("context", torch.int32, trl=False),
    # made for a forward: whether attention sees the token, and a key for its dropout (algorithms.keyed_random)
    ATTENDED: Column("both", torch.bool, trl=False),
    DROPOUT: Column("both", torch.int64, trl=False),
}


@dataclass(frozen=True)
class Rows:
    """Rows of any length, one after the other: the values (N, ...) of all, and the length of each."""

    values: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(cls, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Rows:
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        return cls(torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype), [len(row) for row in tensors])

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        return cls(torch.cat([part.values for part in parts]), [n for part in parts for n in part.lengths])

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.values.split(self.lengths))

    @property
    def bounds(self) -> list[int]:
        """Where each row begins among the values, and where the last one ends."""
        return [0, *itertools.accumulate(self.lengths)]

    def select(self, rows: Sequence[int]) -> Rows:
        bounds = self.bounds
        if rows and [*rows] == [*range(rows[0], rows[-1] + 1)]:  # a view
            parts = self.values[bounds[rows[0]] : bounds[rows[-1] + 1]]
        else:
            parts = torch.cat([self.values[:0], *(self.values[bounds[row] : bounds[row + 1]] for row in rows)])
        return Rows(parts, [self.lengths[row] for row in rows])

    def padded(self, value: float, side: str, multiple: int | None = None, width: int = 1) -> torch.Tensor:
        """The rows as (B, T, ...), padded on one side; T is at least `width`, in whole multiples."""
        batch_BT = pad_sequence(list(self), batch_first=True, padding_value=value, padding_side=side)
        columns = max(batch_BT.size(1), width)
        more = columns + -columns % (multiple or 1) - batch_BT.size(1)
        sides = (more, 0) if side == "left" else (0, more)
        return torch.nn.functional.pad(batch_BT, (*(0, 0) * (batch_BT.dim() - 2), *sides), value=value)

    def state(self) -> dict[str, Any]:
        """The rows for a checkpoint or another process; of equal neighbours (prompts) the values are there once."""
        rows = list(self)
        new = [not place or not torch.equal(rows[place - 1], row) for place, row in enumerate(rows)]
        once = self if all(new) else self.select([place for place, first in enumerate(new) if first])
        return {"values": once.values, "lengths": once.lengths, "rows": [n - 1 for n in itertools.accumulate(new)]}

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> Rows:
        once = cls(state["values"], state["lengths"])
        return once if len(state["rows"]) == len(once) else once.select(state["rows"])


TrlBatch = dict[str, Any]  # a padded batch as TRL's methods take and return it: columns by TRL's names, and constants


# ---- Of the tokens of one completion --------------------------------------------------------------------------------

TokenColumns = Mapping[str, torch.Tensor]  # values of one completion by column, or of what was sampled of it so far


def first_tokens(columns: TokenColumns, context: int, tokens: int) -> dict[str, torch.Tensor]:
    """The columns of the first tokens, which follow `context` tokens that columns of both extents have too."""
    cut = {name: v[: tokens + (context if COLUMNS[name].extent == "both" else 0)] for name, v in columns.items()}
    if (ids_K := columns.get(KEPT_IDS)) is not None:
        cut[KEPT_IDS] = ids_K[: int(cut[KEPT_COUNTS].clamp(min=0).sum())]
    return cut


def continued(before: TokenColumns, turn: TokenColumns, tokens: int) -> dict[str, torch.Tensor]:
    """The columns of a completion and of the `tokens` after it; a float that is missing is NaN, others end there."""
    columns = dict[str, torch.Tensor]()
    for name, values in before.items():
        added = turn.get(name)
        if added is None and values.is_floating_point():
            added = values.new_full((tokens,), torch.nan)
        if added is not None and COLUMNS[name].extent == "both":  # all earlier tokens ran again; the first record stays
            ran = len(values) - 1  # all but the last token
            values, added = values[:ran], added[ran:]
        if added is not None:
            columns[name] = torch.cat([values, added])
    return columns


def answered(columns: TokenColumns, tokens: int) -> dict[str, torch.Tensor]:
    """The columns of a completion and of tokens after it that the model did not write."""
    whole = dict(columns)
    for name, values in columns.items():
        if COLUMNS[name].extent == "completion":
            whole[name] = torch.cat([values, values.new_full((tokens,), COLUMNS[name].neutral)])
    return whole
