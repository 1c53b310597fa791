"""Batches in TRL's layout, and gradients through a scorer, packed or padded."""

from __future__ import annotations

from typing import Any

import torch

from grpo_ext.forward.attention import packed_attention
from grpo_ext.forward.packed import score_packed


def batch_of(prompts: list[int], completions: list[list[int]], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A padded batch in TRL's layout with one group per prompt."""
    generator = torch.Generator().manual_seed(seed)
    width, columns = max(prompts), max(max(c) for c in completions)
    ids, masks = [], []
    for prompt, lengths in zip(prompts, completions):
        tokens = torch.randint(3, 50, (prompt,), generator=generator)
        for length in lengths:
            row, mask = torch.zeros(width + columns, dtype=torch.long), torch.zeros(width + columns, dtype=torch.long)
            row[width - prompt : width] = tokens
            row[width : width + length] = torch.randint(3, 50, (length,), generator=generator)
            mask[width - prompt : width + length] = 1
            ids.append(row)
            masks.append(mask)
    return torch.stack(ids), torch.stack(masks), columns


def loss_of(score: Any, model: Any, batch: Any, **options: Any) -> torch.Tensor:
    logps, entropies, _ = score(model, getattr(model, "get_base_model", lambda: model)(), *batch, **options)
    weights = torch.linspace(0.5, 1.5, logps.numel(), dtype=logps.dtype).view_as(logps)
    return (weights * logps).sum() + 0.3 * (weights * entropies).sum()


def gradient(score: Any, model: Any, batch: Any) -> torch.Tensor:
    model.zero_grad()
    loss = loss_of(score, model, batch)
    with packed_attention(model, score is score_packed):
        loss.backward()
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    return torch.cat([part.flatten() for part in parts])
