"""Rollout batches of tests, from lists of token ids."""

from collections.abc import Sequence
from typing import Any

import torch

from grpo_ext.forward.columns import ROW_IMAGES, Rows
from grpo_ext.rollouts.batch import RolloutBatch, Values


def batch_of_rows(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    advantages: torch.Tensor | Sequence[Any],
    num_generations: int,
    masked_out: Sequence[bool] | None = None,
    row_images: Sequence[bytes] | None = None,
    **tokens: Sequence[Any] | torch.Tensor | None,
) -> RolloutBatch:
    """A rollout batch of rows; columns are sequences as long as each completion, or tensors of one value each."""
    out = masked_out or [False] * len(completion_ids)
    kept = [min(len(ids), 1) if masked else len(ids) for ids, masked in zip(completion_ids, out)]
    masks = [torch.full((n,), int(not masked)) for n, masked in zip(kept, out)]
    columns: dict[str, Values] = {
        "prompt_ids": Rows.of(prompt_ids, torch.long),
        "prompt_mask": Rows.of([torch.ones(len(ids), dtype=torch.long) for ids in prompt_ids]),
        "completion_ids": Rows.of([ids[:n] for ids, n in zip(completion_ids, kept)], torch.long),
        "completion_mask": Rows.of(masks),
    }
    for name, rows in {"advantages": advantages, **tokens}.items():
        if rows is not None:
            cut = not isinstance(rows, torch.Tensor)
            columns[name] = Rows.of([row[:n] for row, n in zip(rows, kept)]) if cut else rows.cpu()  # type: ignore[union-attr]
    if row_images is not None:
        columns[ROW_IMAGES] = list(row_images)
    return RolloutBatch.of_columns(columns, num_generations)
