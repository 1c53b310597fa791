"""The rollout batch from TRL's padded dictionary, which a user's `_generate_and_score_completions` returns.

Columns keep the padding that the user gave them, and fields that TRL does not know are kept.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..compat import images_among
from ..errors import RolloutError
from ..forward.columns import (
    ADVANTAGES,
    COLUMNS,
    COMPLETION_IDS,
    COMPLETION_MASK,
    PROMPT_IDS,
    PROMPT_MASK,
    Rows,
    TrlBatch,
)
from ..runtime.collectives import gather_lists
from .batch import OWN, RolloutBatch, Values, concatenated

_REQUIRED = (PROMPT_IDS, PROMPT_MASK, COMPLETION_IDS, COMPLETION_MASK, ADVANTAGES)


def gather_scored(scored: TrlBatch, num_rows: int, num_generations: int) -> RolloutBatch:
    """Gather the dictionaries that a user's `_generate_and_score_completions` returned on all processes; one exchange.

    Columns keep their padding, and fields that TRL does not know are kept. Images are left out, because every forward
    prepares them. The override was called with `num_rows` rows; 0 on a process without prompts.
    """
    images = images_among(scored)
    entries = {name: _on_cpu(value) for name, value in scored.items() if name not in images}
    shares: list[tuple[int, TrlBatch]] = gather_lists([(num_rows, entries)])
    shares = [share for share in shares if share[0]]
    for rows, share in shares:
        if taken := sorted(name for name in share if not COLUMNS.get(name, OWN).trl):
            raise RolloutError(
                f"_generate_and_score_completions returned {', '.join(taken)}, a name that the trainer uses itself; "
                "give your field another."
            )
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
    for name in (n for n, kind in COLUMNS.items() if kind.of_rows):  # on one process all may have one token
        if isinstance(column := columns.get(name), Rows) and set(column.lengths) <= {1}:
            columns[name] = column.values[:, None]
    constants = {name: value for name, value in shares[0][1].items() if parts[0][name] is None}
    batch = RolloutBatch.of_columns(columns, num_generations)
    widths = max(batch[PROMPT_IDS].lengths), max(batch[COMPLETION_IDS].lengths)
    tokens, items, per_token = int(batch.loss_masks.values.sum()), constants.get("num_items_in_batch"), None
    if items is not None and tokens and float(items) != tokens:
        per_token = float(items) / tokens
    return replace(batch, constants=constants, widths=widths, items_per_token=per_token)


def _column(name: str, value: Any, rows: int) -> Values | None:
    """An entry of TRL's dictionary as a column; None where it has no value for each row."""
    if isinstance(value, torch.Tensor) and value.dim() and value.size(0) == rows:
        if (kind := COLUMNS.get(name, OWN)).trl and kind.extent != "row" and value.dim() == 2:
            return Rows(value.flatten(0, 1), [value.size(1)] * rows)
        return value
    return list(value) if isinstance(value, (list, tuple)) and len(value) == rows else None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = list(value) if value.dtype.kind not in "biuf" else torch.from_numpy(value)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
