"""The rollout batch: completions and advantages in global order, the same on every process, on the CPU, unpadded.

Differs from TRL, where each process holds its own padded part. `join` builds it, a step selects its completions, and a
micro-batch takes token rows and TRL's padded dictionary from it. Shapes: B completions, T tokens, N values.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from ..batching.micro_batches import StepSizes
from ..batching.sizes import group_numbers
from ..errors import RolloutError
from ..forward.columns import (
    ADVANTAGES,
    ATTENDED,
    COLUMNS,
    COMPLETION_IDS,
    COMPLETION_MASK,
    CONTEXT_IDS,
    EXPERTS,
    FURTHER_ROWS,
    KEPT_COUNTS,
    KEPT_IDS,
    PROMPT_IDS,
    PROMPT_MASK,
    TOOL_MASK,
    Column,
    Rows,
    TrlBatch,
)
from ..forward.further_rows import Row, decoded
from ..forward.images import RowImages, joined
from ..forward.rows import RowOf, TokenRows
from ..runtime.messages import logger

OWN = Column("row")  # a column that a user's `_generate_and_score_completions` made
# of completions: values of any length each, one value of one shape each, or Python objects
Values = Rows | torch.Tensor | list[Any]


@dataclass(frozen=True)
class RolloutBatch:
    """Scored completions (of a rollout batch, a step or a micro-batch) in global order, the same on every process."""

    columns: Mapping[str, Values]  # by name of `forward.columns`, or by the name that a user's override gave it
    groups: Sequence[int]  # which group of the rollout batch each completion belongs to
    constants: Mapping[str, Any] = field(default_factory=dict)  # of a user's override, the same for all completions
    # padded widths of prompts and completions in every micro-batch; None: as wide as its longest need
    widths: tuple[int, int] | None = None
    # TRL's `num_items_in_batch` over the tokens that carry loss, where an override returns another number of them;
    # TRL's token mean divides by it
    items_per_token: float | None = None

    @classmethod
    def of_columns(cls, columns: Mapping[str, Values], num_generations: int) -> RolloutBatch:
        return cls(columns, group_numbers(len(columns[COMPLETION_IDS]), num_generations))

    @classmethod
    def joined(cls, batches: Sequence[RolloutBatch], num_generations: int) -> RolloutBatch:
        widths = [batch.widths for batch in batches if batch.widths is not None]
        widest = (max(w[0] for w in widths), max(w[1] for w in widths)) if widths else None
        columns = concatenated([batch.columns for batch in batches])
        groups = group_numbers(sum(map(len, batches)), num_generations)
        return replace(batches[0], columns=columns, groups=groups, widths=widest)

    def __len__(self) -> int:
        return len(self.columns[COMPLETION_IDS])

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def having(self, name: str, values: Values | None) -> RolloutBatch:
        """The same completions with a column; None: without it."""
        others = {other: column for other, column in self.columns.items() if other != name}
        return replace(self, columns=others if values is None else others | {name: values})

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        columns = {name: _selected(column, rows) for name, column in self.columns.items()}
        return replace(self, columns=columns, groups=[self.groups[row] for row in rows])

    # ---- Tokens and lengths ---------------------------------------------------------------------------------------

    @functools.cached_property
    def prompts(self) -> Rows:
        """Token ids of each prompt, from the first that attention sees."""
        return self._seen(PROMPT_IDS)

    @functools.cached_property
    def completions(self) -> Rows:
        """Token ids of each completion, up to the last that attention sees; none of one that is masked out."""
        return self._seen(COMPLETION_IDS)

    @property
    def completion_masks(self) -> Rows:
        """1 on the tokens of `completions` that attention sees."""
        if COMPLETION_MASK in self.columns:
            return self._seen(COMPLETION_MASK)
        return replace(self.completions, values=torch.ones_like(self.completions.values))

    def _seen(self, name: str) -> Rows:
        """The values of a column of tokens, from the first to the last that attention sees."""
        of_prompt, column = COLUMNS[name].extent == "prompt", self[name]
        mask: Rows | None = self.columns.get(PROMPT_MASK if of_prompt else COMPLETION_MASK)  # type: ignore[assignment]
        if mask is None:
            return column
        rows = zip(column, _spans(mask), strict=True)
        return Rows.of([row[first:] if of_prompt else row[:stop] for row, (first, stop) in rows])

    @property
    def several(self) -> bool:
        """Whether completions have several rows."""
        return FURTHER_ROWS in self.columns and any(self[FURTHER_ROWS].lengths)

    @functools.cached_property
    def rows(self) -> list[list[Row]]:
        """The rows of each completion."""
        nothing: Any = [torch.empty(0)] * len(self)
        columns = self.prompts, self.completions, *(self.columns.get(n, nothing) for n in (FURTHER_ROWS, CONTEXT_IDS))
        return [decoded(*row) for row in zip(*columns, strict=True)]

    @functools.cached_property
    def group_lengths(self) -> dict[int, tuple[int, ...]]:
        """Tokens after the prompt, of each row of the completions of each group that begins with it."""
        lengths: dict[int, tuple[int, ...]] = {}
        for group, rows in zip(self.groups, self.rows, strict=True):
            lengths[group] = (*lengths.get(group, ()), *(row.size.after for row in rows if row.shares))
        return lengths

    @functools.cached_property
    def attended(self) -> torch.Tensor | None:
        """Whether attention sees each token of prompts and completions; None where it sees all.

        A user's override may mask tokens between others.
        """
        if PROMPT_MASK not in self.columns:  # such an override returns both masks
            return None
        masks = zip(self._seen(PROMPT_MASK), self.completion_masks, strict=True)
        attended_N = torch.cat([part.bool() for parts in masks for part in parts])
        return None if attended_N.all() else attended_N

    def sizes(self, multiple: int) -> StepSizes:
        """Tokens of the prompts and completions; a completion that is masked out has none.

        Where rows of a group have different prompts (environments), every row counts as a group of its own.
        """
        rows, groups, prompts = range(len(self)), self.groups, list(self.prompts)
        shared = all(torch.equal(prompts[row - 1], prompts[row]) for row in rows[1:] if groups[row - 1] == groups[row])
        numbers, sizes = groups if shared else rows, [[row.size for row in rows] for rows in self.rows]
        after_B = [sum(size.after + size.prompt * (not size.shares) for size in of_one) for of_one in sizes]
        return StepSizes(numbers, self.prompts.lengths, after_B, multiple, sizes if self.several else None)

    @property
    def loss_masks(self) -> Rows:
        """1 on the tokens that carry loss."""
        ids, masks = self[COMPLETION_IDS], [self[n].values for n in (COMPLETION_MASK, TOOL_MASK) if n in self.columns]
        return replace(ids, values=functools.reduce(torch.mul, masks, torch.ones_like(ids.values, dtype=torch.bool)))

    @property
    def contributing_rows(self) -> list[int]:
        """Rows with an advantage other than zero and a token that carries loss; the others add exactly nothing.

        An advantage that is NaN counts, so that it shows in the loss.
        """
        pairs = enumerate(zip(self[ADVANTAGES], self.loss_masks, strict=True))
        return [row for row, (advantage, mask) in pairs if (advantage != 0).any() and mask.any()]

    # ---- For a forward and a loss ---------------------------------------------------------------------------------

    def token_rows(self, images: RowImages | None, group_lengths: Mapping[int, tuple[int, ...]]) -> TokenRows:
        """The tokens of the rows of these completions; `group_lengths` are those of their whole groups."""
        pairs = [(number, row) for number, rows in enumerate(self.rows) for row in rows]
        groups, sizes = [self.groups[number] for number, _ in pairs], [row.size for _, row in pairs]
        lengths = {EXPERTS: [n.prompt + n.after for n in sizes], KEPT_COUNTS: [r.stop - r.start for _, r in pairs]}
        columns = {name: Rows(self[name].values, n) for name, n in lengths.items() if name in self.columns}
        if KEPT_IDS in self.columns:
            counts = [int(row.clamp(min=0).sum()) for row in columns[KEPT_COUNTS]]
            columns[KEPT_IDS] = Rows(self[KEPT_IDS].values, counts)
        # within a group: whether another group with the same prompt lies beside it depends on the split
        experts, runs, numbers = columns.get(EXPERTS, Rows.of([[]] * len(pairs))), list[int](), itertools.count()
        of_groups: dict[int, dict[int, Any]] = {group: {} for group in groups}  # prompts by run
        for (_, row), group, experts_NC in zip(pairs, groups, experts, strict=True):
            others = of_groups[group] if row.shares else {}
            prompt = row.prompt, experts_NC[: len(row.prompt)]  # rows of one prompt may have other experts
            alike = next((run for run, other in others.items() if all(map(torch.equal, prompt, other))), None)
            runs.append(next(numbers) if alike is None else alike)
            others.setdefault(runs[-1], prompt)
        completions, several = list(self.completions), None
        if self.several:
            of_rows = zip(pairs, runs, strict=True)
            several = [RowOf(n, len(row.context), row.repeated, row.shares, run) for (n, row), run in of_rows]
        rows = TokenRows(
            torch.cat([part for number, row in pairs for part in row.ids(completions[number])]).long(),
            [size.prompt for size in sizes],
            [size.after for size in sizes],
            [one == other for one, other in itertools.pairwise(runs)],
            images,
            columns,
            [group_lengths[g] if size.shares else (size.after,) for g, size in zip(groups, sizes, strict=True)],
            several,
        )
        return rows.having(ATTENDED, self.attended)

    def as_trl(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> TrlBatch:
        """TRL's dictionary: padded, prompts on the left and completions on the right."""
        multiple = pad_to_multiple_of if self.widths is None else None
        prompt, completion = self.widths or (1, 1)
        masks = {PROMPT_MASK: PROMPT_IDS, COMPLETION_MASK: COMPLETION_IDS}
        ones = {mask: replace(self[ids], values=torch.ones_like(self[ids].values)) for mask, ids in masks.items()}
        batch: TrlBatch = dict(self.constants)
        for name, column in {**ones, **self.columns}.items():
            kind = COLUMNS.get(name, OWN)
            if not kind.trl:
                continue
            if not isinstance(column, Rows):
                batch[name] = column
                continue
            side, width = ("left", prompt) if kind.extent == "prompt" else ("right", completion)
            if self.widths is None and not column.values.is_floating_point():  # else they have a user's type
                column = replace(column, values=column.values.long())
            batch[name] = column.padded(pad_token_id if kind.fill is None else kind.fill, side, multiple, width)
        return batch


def _spans(mask: Rows) -> list[tuple[int, int]]:
    """For each row, the places of its first 1 and after its last 1; (length, 0) for a row without any."""
    places = [row.nonzero().flatten().tolist() for row in mask]
    return [(ones[0], ones[-1] + 1) if ones else (n, 0) for ones, n in zip(places, mask.lengths, strict=True)]


def _selected(column: Values, rows: Sequence[int]) -> Values:
    if isinstance(column, Rows):
        return column.select(rows)
    return column[list(rows)] if isinstance(column, torch.Tensor) else [column[row] for row in rows]


def concatenated(parts: Sequence[Mapping[str, Values]]) -> dict[str, Values]:
    """The columns of several parts, one after the other; a RolloutError where one is missing in some.

    Masks may be: where a `rollout_func` returned no `env_mask`, the model wrote all tokens.
    """
    names = list(dict.fromkeys(name for part in parts for name in part))
    whole = [{name: part[name] if name in part else _absent(name, part) for name in names} for part in parts]
    if missing := sorted(name for name in names if any(part[name] is None for part in whole)):
        raise RolloutError(
            f"{', '.join(missing)} came with some completions of a rollout batch and not with all, from a rollout_func "
            "(its logprobs are sampling_per_token_logps) or an override; return it for all of them, on every process "
            "and in every round, or for none."
        )
    return {name: _concatenated(name, [part[name] for part in whole]) for name in names}


def _absent(name: str, part: Mapping[str, Values]) -> Rows | None:
    """A column that a part lacks; None where it has to have it."""
    kind = COLUMNS.get(name, OWN)
    if kind.extent in ("further", "context"):  # each of its completions has one row
        return Rows(torch.empty(0, dtype=kind.dtype), [0] * len(part[COMPLETION_IDS]))
    if kind.dtype != torch.bool:
        return None
    ids: Any = part[PROMPT_IDS if kind.extent == "prompt" else COMPLETION_IDS]
    return replace(ids, values=torch.ones_like(ids.values, dtype=torch.bool))


def _concatenated(name: str, parts: Sequence[Any]) -> Values:
    """One column; values of unequal shapes get zeros after them, and before them where prompts are padded."""
    if isinstance(parts[0], Rows):
        return Rows.joined(parts)
    if isinstance(parts[0], list):
        return [entry for part in parts for entry in part]
    if name.startswith("prompt_") and parts[0].dim() > 1:
        return joined([part.flip(1) for part in parts]).flip(1)
    return joined(parts)


# ---- In a checkpoint: nested dictionaries, lists and tensors, as `run.state` writes them -----------------------------


def batch_state(batch: RolloutBatch) -> dict[str, Any] | None:
    """A rollout batch for a checkpoint; None, with a warning, for one with objects that no file can hold."""
    objects = {n: v for n, v in {**batch.columns, **batch.constants}.items() if not isinstance(v, (torch.Tensor, Rows))}
    if unstorable := [n for n, value in objects.items() if not (_are_files(value) or _loads_again(value))]:
        logger.warning(
            f"A checkpoint cannot hold {', '.join(unstorable)} of this rollout batch (Python objects other than "
            "numbers, texts, lists and dictionaries of them), so it is left out: a run that resumes here samples "
            "it again, with the weights as they are then. Return tensors from _generate_and_score_completions."
        )
        return None
    columns = {name: column_state(column) for name, column in batch.columns.items()}
    state = {spec.name: getattr(batch, spec.name) for spec in fields(batch)}
    return state | {"columns": columns, "groups": list(batch.groups), "constants": dict(batch.constants)}


def saved_batch(state: dict[str, Any]) -> RolloutBatch:
    widths, columns = state["widths"], {name: saved_column(part) for name, part in state["columns"].items()}
    return RolloutBatch(**{**state, "columns": columns, "widths": None if widths is None else tuple(widths)})


def column_state(column: Values) -> Any:
    """A column for a checkpoint or another process, in which equal neighbours are there once."""
    if _are_files(column):
        files = Rows.of([torch.from_numpy(np.frombuffer(bytearray(file), np.uint8)) for file in column])
        return {"files": files.state()}
    return column.state() if isinstance(column, Rows) else column


def saved_column(state: Any) -> Values:
    if not isinstance(state, dict):
        return state
    if "files" not in state:
        return Rows.saved(state)
    files = state["files"]  # rows share them
    once = [part.numpy().tobytes() for part in Rows(files["values"], files["lengths"])]
    return [once[number] for number in files["rows"]]


def _are_files(column: Any) -> bool:
    return isinstance(column, list) and bool(column) and all(isinstance(value, bytes) for value in column)


def _loads_again(value: Any) -> bool:
    """Whether a value can be read from a checkpoint, which is read with `weights_only`."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # whatever pickle raises
        return False
    return True
