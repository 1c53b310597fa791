"""The rollout batch: completions and advantages in global order, the same on every process, on the CPU, unpadded.

Differs from TRL, where each process holds its own padded part. `join` builds it, a step selects its completions, and a
micro-batch takes token rows and TRL's padded dictionary from it. Shapes: B completions, T tokens, N values.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch.nn.utils.rnn import pad_sequence

from ..batching.micro_batches import StepSizes
from ..batching.sizes import group_numbers
from ..compat import images_among
from ..errors import RolloutError
from ..forward.images import RowImages, joined
from ..forward.rows import TokenRows
from ..forward.sampling_masks import KeptIds
from ..runtime.collectives import gather_lists

logger = get_logger(__name__)

# the place of a completion in the step, in dictionaries for users; the images of a model that takes some
ROW, ROW_IMAGES = "grpo_ext_row", "row_images"
KEPT_COUNTS, KEPT_IDS, SAMPLER_LOGPS, EXPERTS = "kept_counts", "kept_ids", "sampler_logps", "experts"  # `TokenRecord`
_NOT_OF_TRL = (KEPT_COUNTS, KEPT_IDS, EXPERTS)
TEACHER_LOGPS = "teacher_per_token_logps"  # TRL's dictionary has it too, so that overrides pass it on
# columns by the model that scores, a field of `worker.Models`
MODEL_LOGPS = {"policy": "old_per_token_logps", "reference": "ref_per_token_logps", "teacher": TEACHER_LOGPS}
# columns with one value for each token, in TRL's dictionary (B, T)
_OF_TOKENS = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"),
    *(*MODEL_LOGPS.values(), "sampling_per_token_logps", "importance_sampling_ratio"),
)


def padded(
    rows: Sequence[torch.Tensor], value: float, side: str, multiple: int | None = None, width: int = 1
) -> torch.Tensor:
    """Rows (T, ...) of any length as one (B, T, ...), padded on one side; T is at least `width`, in whole multiples."""
    batch_BT = pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)
    columns = max(batch_BT.size(1), width)
    more = columns + -columns % (multiple or 1) - batch_BT.size(1)
    sides = (more, 0) if side == "left" else (0, more)
    return torch.nn.functional.pad(batch_BT, (*(0, 0) * (batch_BT.dim() - 2), *sides), value=value)


@dataclass(frozen=True)
class Ragged:
    """Rows of any length, one after the other: the values (N, ...) of all, and the length of each."""

    values: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(cls, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Ragged:
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        return cls(torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype), [len(row) for row in tensors])

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.values.split(self.lengths))

    @property
    def bounds(self) -> list[int]:
        """Where each row begins among the values, and where the last one ends."""
        return [0, *itertools.accumulate(self.lengths)]

    def select(self, rows: Sequence[int]) -> Ragged:
        bounds = self.bounds
        parts = [self.values[bounds[row] : bounds[row + 1]] for row in rows]
        return Ragged(torch.cat(parts) if parts else self.values[:0], [self.lengths[row] for row in rows])


# values of completions: of any length each, of one shape each, or Python objects
Column = Ragged | torch.Tensor | list[Any]


@dataclass
class RolloutBatch:
    """Scored completions (of a rollout batch, a step or a micro-batch) in global order, the same on every process."""

    # what has one entry for each completion, by TRL's name (`batch[name]`), or the name that a user's
    # `_generate_and_score_completions` gave it:
    # - prompt_ids, prompt_mask: the mask is 1 where attention sees the token
    # - completion_ids, completion_mask: the mask is 1 where attention sees the token, and 0 on a truncated completion
    #   that `mask_truncated_completions` leaves out
    # - advantages: (B,), or one for each token
    # - tool_mask: 0 on tokens of tools and environments, which carry no loss; missing where there are none
    # - old_, ref_, teacher_ and sampling_per_token_logps: of the policy that sampled, the reference, the teacher and
    #   the inference engine; each only where the run needs it
    # - importance_sampling_ratio: of the policy to the engine, (B, 1) or one for each token
    # - row_images: of a model that takes images, the bytes of a file with all that a completion shows; rows with the
    #   same images share one object
    # - sampler_logps, kept_counts, kept_ids: see `TokenRecord`; the latter two are not in TRL's dictionary
    # - experts: of the tokens of prompt and completion, (N, C); not in TRL's dictionary
    columns: dict[str, Column]
    groups: Sequence[int]  # which group of the rollout batch each completion belongs to
    constants: dict[str, Any] = field(default_factory=dict)  # of a user's override, without one value per completion
    # padded widths of prompts and completions in every micro-batch; None: as wide as its longest need
    widths: tuple[int, int] | None = None
    # TRL's `num_items_in_batch` over the tokens that carry loss, where an override returns another number of them;
    # TRL's token mean divides by it
    items_per_token: float | None = None

    @classmethod
    def of_columns(cls, columns: Mapping[str, Column], num_generations: int, **others: Any) -> RolloutBatch:
        return cls(dict(columns), group_numbers(len(columns["completion_ids"]), num_generations), **others)

    @classmethod
    def joined(cls, batches: Sequence[RolloutBatch], num_generations: int) -> RolloutBatch:
        first, columns = batches[0], concatenated([batch.columns for batch in batches])
        widths = [batch.widths for batch in batches if batch.widths is not None]
        widest = (max(w[0] for w in widths), max(w[1] for w in widths)) if widths else None
        others: dict[str, Any] = {"constants": first.constants, "items_per_token": first.items_per_token}
        return cls.of_columns(columns, num_generations, widths=widest, **others)

    def __len__(self) -> int:
        return len(self.columns["completion_ids"])

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        columns = {name: _selected(column, rows) for name, column in self.columns.items()}
        return replace(self, columns=columns, groups=[self.groups[row] for row in rows])

    # ---- Lengths --------------------------------------------------------------------------------------------------

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt, from the first that attention sees."""
        spans = _spans(self["prompt_mask"])
        return [total - first for total, (first, _) in zip(self["prompt_ids"].lengths, spans, strict=True)]

    @property
    def completion_lengths(self) -> list[int]:
        """Tokens of each completion, up to the last that attention sees; 0 for one that is masked out."""
        return [stop for _, stop in _spans(self["completion_mask"])]

    @property
    def recorded_lengths(self) -> list[int]:
        """Tokens of each completion that a run's records take, without padding; 1 for one that is masked out."""
        return [max(length, 1) for length in self.completion_lengths]

    @functools.cached_property
    def group_lengths(self) -> dict[int, tuple[int, ...]]:
        pairs = sorted(zip(self.groups, self.completion_lengths, strict=True), key=lambda pair: pair[0])
        return {group: tuple(n for _, n in rows) for group, rows in itertools.groupby(pairs, lambda pair: pair[0])}

    @property
    def gaps(self) -> list[bool]:
        """For each completion, whether a user's override masks a token between others that attention sees."""
        columns = (self["prompt_mask"], self.prompt_lengths, self["completion_mask"], self.completion_lengths)
        return [int(prompt.sum() + row.sum()) < n + m for prompt, n, row, m in zip(*columns, strict=True)]

    def sizes(self, multiple: int = 1) -> StepSizes:
        """Tokens of the prompts and completions; a completion that is masked out has none.

        Where rows of a group have different prompts (environments), every row counts as a group of its own.
        """
        lengths, rows, groups = self.prompt_lengths, range(len(self)), self.groups
        prompts = [ids[len(ids) - n :] for ids, n in zip(self["prompt_ids"], lengths, strict=True)]
        shared = all(torch.equal(prompts[row - 1], prompts[row]) for row in rows[1:] if groups[row - 1] == groups[row])
        return StepSizes(groups if shared else rows, lengths, self.completion_lengths, multiple)

    @property
    def loss_masks(self) -> Ragged:
        """1 on the tokens that carry loss."""
        mask: Ragged = self["completion_mask"]
        return Ragged(mask.values * self["tool_mask"].values, mask.lengths) if "tool_mask" in self.columns else mask

    @property
    def contributing_rows(self) -> list[int]:
        """Rows with an advantage other than zero and a token that carries loss; the others add exactly nothing.

        An advantage that is NaN counts, so that it shows in the loss.
        """
        pairs = enumerate(zip(self["advantages"], self.loss_masks, strict=True))
        return [row for row, (advantage, mask) in pairs if bool((advantage != 0).any()) and bool(mask.any())]

    # ---- For a forward and a loss ---------------------------------------------------------------------------------

    def token_rows(self, images: RowImages | None = None) -> TokenRows:
        prompts, completions = self.prompt_lengths, self.completion_lengths

        def tokens(before: Ragged, after: Ragged) -> list[torch.Tensor]:
            parts = zip(before, after, prompts, completions, strict=True)
            return [part for p, c, n, m in parts for part in (p[len(p) - n :], c[:m])]

        ids = tokens(self["prompt_ids"], self["completion_ids"])
        # within a group: whether another group with the same prompt lies beside it depends on the split
        neighbours = itertools.pairwise(zip(self.groups, ids[::2], strict=True))
        same = [group == before and torch.equal(one, other) for (before, one), (group, other) in neighbours]
        experts = None
        if EXPERTS in self.columns:
            parts = [row_NC[: n + m] for row_NC, n, m in zip(self[EXPERTS], prompts, completions, strict=True)]
            pairs = zip(same, itertools.pairwise(parts), prompts)  # rows of one prompt may have other experts
            same = [text and torch.equal(one[:n], other[:n]) for text, (one, other), n in pairs]
            experts = torch.cat(parts)
        attended = None
        if any(self.gaps):
            attended = torch.cat(tokens(self["prompt_mask"], self["completion_mask"])).bool()
        kept_B = None
        if KEPT_COUNTS in self.columns:
            rows = zip(self[KEPT_COUNTS], self[KEPT_IDS], completions, strict=True)
            kept_B = [KeptIds(counts_T, ids_K).first(n) for counts_T, ids_K, n in rows]
        return TokenRows(torch.cat(ids), prompts, completions, same, images, attended, kept_B, experts)

    def collate(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> dict[str, Any]:
        """TRL's dictionary: padded, prompts on the left and completions on the right."""
        multiple = pad_to_multiple_of if self.widths is None else None
        prompt, completion = self.widths or (1, 1)
        batch: dict[str, Any] = dict(self.constants)
        for name, column in self.columns.items():
            if name in _NOT_OF_TRL:
                continue
            if not isinstance(column, Ragged):
                batch[name] = column
                continue
            # a ratio of 1 is no correction; the VESPO weight sums its logarithm over the padding too
            neutral = 1 if name in ("tool_mask", "importance_sampling_ratio") else 0
            fill = pad_token_id if name in ("prompt_ids", "completion_ids") else neutral
            side, width = ("left", prompt) if name.startswith("prompt_") else ("right", completion)
            batch[name] = padded(list(column), fill, side, multiple, width)
        return batch


def _spans(mask: Ragged) -> list[tuple[int, int]]:
    """For each row, the places of its first 1 and after its last 1; (length, 0) for a row without any."""
    bounds = torch.tensor(mask.bounds)
    ones = mask.values.nonzero().squeeze(1)
    before = torch.searchsorted(ones, bounds).tolist()  # ones before each row
    places, starts = ones.tolist(), mask.bounds
    return [
        (places[first] - start, places[last - 1] + 1 - start) if first < last else (length, 0)
        for (first, last), start, length in zip(itertools.pairwise(before), starts[:-1], mask.lengths, strict=True)
    ]


def _selected(column: Column, rows: Sequence[int]) -> Column:
    if isinstance(column, Ragged):
        return column.select(rows)
    return column[list(rows)] if isinstance(column, torch.Tensor) else [column[row] for row in rows]


def concatenated(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """The columns of several parts, one after the other; a RolloutError where one is missing in some.

    `tool_mask` may be, where a `rollout_func` returned no `env_mask`: the model wrote all tokens.
    """
    if any("tool_mask" in part for part in parts):
        parts = [{"tool_mask": part["completion_mask"], **part} for part in parts]
    names = {name for part in parts for name in part}
    if missing := sorted(name for name in names if not all(name in part for part in parts)):
        raise RolloutError(
            f"{', '.join(missing)} came with some completions of a rollout batch and not with all, from a rollout_func "
            "(its logprobs are sampling_per_token_logps) or an override; return it for all of them, on every process "
            "and in every round, or for none."
        )
    return {name: _concatenated(name, [part[name] for part in parts]) for name in parts[0]}


def _concatenated(name: str, parts: Sequence[Any]) -> Column:
    """One column; values of unequal shapes get zeros after them, and before them where prompts are padded."""
    if isinstance(parts[0], Ragged):
        return Ragged(torch.cat([part.values for part in parts]), [n for part in parts for n in part.lengths])
    if isinstance(parts[0], list):
        return [entry for part in parts for entry in part]
    if name.startswith("prompt_") and parts[0].dim() > 1:
        return joined([part.flip(1) for part in parts]).flip(1)
    return joined(parts)


# ---- From TRL's dictionary ------------------------------------------------------------------------------------------

_REQUIRED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


def gather_scored(scored: Mapping[str, Any], num_rows: int, num_generations: int) -> RolloutBatch:
    """Gather the dictionaries that a user's `_generate_and_score_completions` returned on all processes; one exchange.

    Columns keep their padding, and fields that TRL does not know are kept. Images are left out, because every forward
    prepares them. The override was called with `num_rows` rows; 0 on a process without prompts.
    """
    images = images_among(scored)
    entries = {name: _on_cpu(value) for name, value in scored.items() if name not in images}
    shares: list[tuple[int, dict[str, Any]]] = gather_lists([(num_rows, entries)])
    shares = [share for share in shares if share[0]]
    for rows, share in shares:
        if missing := [name for name in _REQUIRED if share.get(name) is None]:
            raise RolloutError(
                f"_generate_and_score_completions returned no {', '.join(missing)}; the loss needs them."
            )
        if (count := len(share["completion_ids"])) != rows:
            raise RolloutError(
                f"_generate_and_score_completions returned {count} completions for {rows} rows; a step is made of all "
                "rows of its rollout batch. Return one completion for each row, with advantage 0 where nothing is to "
                "be learned."
            )
    parts = [{name: _column(name, value, rows) for name, value in share.items()} for rows, share in shares]
    columns = concatenated([{n: c for n, c in sorted(part.items()) if c is not None} for part in parts])
    constants = {name: value for name, value in shares[0][1].items() if parts[0][name] is None}
    batch = RolloutBatch.of_columns(_one_each(columns), num_generations, constants=constants)
    batch.widths = (max(batch["prompt_ids"].lengths), max(batch["completion_ids"].lengths))
    tokens, items = int(batch.loss_masks.values.sum()), constants.get("num_items_in_batch")
    if items is not None and tokens and float(items) != tokens:
        batch.items_per_token = float(items) / tokens
    return batch


def _column(name: str, value: Any, rows: int) -> Column | None:
    """An entry of TRL's dictionary as a column; None where it has no value for each row."""
    if isinstance(value, torch.Tensor) and value.dim() and value.size(0) == rows:
        if name in _OF_TOKENS and value.dim() == 2:
            return Ragged(value.flatten(0, 1), [value.size(1)] * rows)
        return value
    return list(value) if isinstance(value, (list, tuple)) and len(value) == rows else None


def _one_each(columns: dict[str, Column]) -> dict[str, Column]:
    """Advantages and ratios with one value per completion, as (B, 1); on one process all may have one token."""
    single: dict[str, Column] = {}
    for name in ("advantages", "importance_sampling_ratio"):
        if isinstance(column := columns.get(name), Ragged) and set(column.lengths) <= {1}:
            single[name] = column.values[:, None]
    return columns | single


def _on_cpu(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = list(value) if value.dtype.kind not in "biuf" else torch.from_numpy(value)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


# ---- In a checkpoint: nested dictionaries, lists and tensors, as `run.state` writes them -----------------------------


def batch_state(batch: RolloutBatch) -> dict[str, Any] | None:
    """A rollout batch for a checkpoint; None, with a warning, for one with objects that no file can hold."""
    objects = {n: v for n, v in (batch.columns | batch.constants).items() if not isinstance(v, (torch.Tensor, Ragged))}
    if unstorable := [n for n, value in objects.items() if not (_are_files(value) or _survives_json(value))]:
        logger.warning(
            f"A checkpoint cannot hold {', '.join(unstorable)} of this rollout batch (Python objects other than "
            "numbers, texts, lists and dictionaries of them), so it is left out: a run that resumes here samples "
            "it again, with the weights as they are then. Return tensors from _generate_and_score_completions."
        )
        return None
    return {
        "columns": {name: _column_state(column) for name, column in batch.columns.items()},
        "groups": list(batch.groups),
        "constants": batch.constants,
        "widths": batch.widths,
        "items_per_token": batch.items_per_token,
    }


def saved_batch(state: dict[str, Any]) -> RolloutBatch:
    widths, columns = state["widths"], {name: _saved_column(part) for name, part in state["columns"].items()}
    return RolloutBatch(**{**state, "columns": columns, "widths": None if widths is None else tuple(widths)})


def _column_state(column: Column) -> Any:
    if _are_files(column):  # rows share them
        different = list(dict.fromkeys(column))
        files = [torch.from_numpy(np.frombuffer(bytearray(file), np.uint8)) for file in different]
        return _column_state(Ragged.of(files, torch.uint8)) | {"rows": [different.index(file) for file in column]}
    return {"values": column.values, "lengths": column.lengths} if isinstance(column, Ragged) else column


def _saved_column(state: Any) -> Column:
    if not isinstance(state, dict):
        return state
    parts = Ragged(state["values"], state["lengths"])
    if "rows" not in state:
        return parts
    files = [part.numpy().tobytes() for part in parts]
    return [files[number] for number in state["rows"]]


def _are_files(column: Any) -> bool:
    return isinstance(column, list) and bool(column) and all(isinstance(value, bytes) for value in column)


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
