"""The state of rollouts in a checkpoint: the rollout batch that is trained on, and what samples further ones ahead.

Nested dictionaries, lists and tensors, as `run.state` writes them. Called by rollouts.source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger

from ..forward.snapshot import Weights
from .batch import Column, Ragged, RolloutBatch

logger = get_logger(__name__)


def batch_state(batch: RolloutBatch | None) -> dict[str, Any] | None:
    """A rollout batch for a checkpoint; None, with a warning, for one with objects that no file can hold."""
    if batch is None:
        return None
    lists = {name: column for name, column in batch.columns.items() if isinstance(column, list)}
    values = {name: value for name, value in batch.constants.items() if not isinstance(value, torch.Tensor)}
    others = {name: value for name, value in (lists | values).items() if not _are_files(value)}
    if unstorable := [name for name, value in others.items() if not _survives_json(value)]:
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


def saved_batch(state: dict[str, Any] | None) -> RolloutBatch | None:
    if state is None:
        return None
    widths, columns = state["widths"], {name: _column(part) for name, part in state["columns"].items()}
    return RolloutBatch(**{**state, "columns": columns, "widths": None if widths is None else tuple(widths)})


def _column_state(column: Column) -> Any:
    if _are_files(column):  # rows share them
        different = list(dict.fromkeys(column))
        files = [torch.from_numpy(np.frombuffer(bytearray(file), np.uint8)) for file in different]
        return _column_state(Ragged.of(files, torch.uint8)) | {"rows": [different.index(file) for file in column]}
    return {"values": column.values, "lengths": column.lengths} if isinstance(column, Ragged) else column


def _column(state: Any) -> Column:
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


def waiting_state(waiting: Sequence[tuple[int, Weights]]) -> dict[str, Any]:
    """First steps of rollout batches and the weights that sample them, of which each is stored once."""
    weights = {part.step: vars(part) for _, part in waiting}
    return {"steps": [[step, part.step] for step, part in waiting], "weights": list(weights.values())}


def saved_waiting(state: dict[str, Any]) -> list[tuple[int, Weights]]:
    """The pairs of `waiting_state`; those with the same weights share one object."""
    weights = {part.step: part for part in (Weights(**fields) for fields in state["weights"])}
    return [(step, weights[sampled_by]) for step, sampled_by in state["steps"]]
