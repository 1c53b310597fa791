"""Rows of tokens, and gradients through a scorer, packed or padded."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from grpo_ext.algorithms.losses import router_statistics
from grpo_ext.forward.attention import packed_attention
from grpo_ext.forward.forms import score_packed, score_padded, score_prefix
from grpo_ext.forward.prefix_cache import cached_under_checkpointing
from grpo_ext.forward.rows import TokenRows


def rows_of(prompts: list[int], completions: list[list[int]], seed: int = 0) -> TokenRows:
    """Rows with one group per prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[torch.Tensor] = []
    for prompt, lengths in zip(prompts, completions):
        tokens = torch.randint(3, 50, (prompt,), generator=generator)
        for length in lengths:
            ids += [tokens, torch.randint(3, 50, (length,), generator=generator)]
    own = [prompt for prompt, lengths in zip(prompts, completions) for _ in lengths]
    groups = [number for number, lengths in enumerate(completions) for _ in lengths]
    same = [before == after for before, after in itertools.pairwise(groups)]
    return TokenRows(torch.cat(ids), own, [length for lengths in completions for length in lengths], same)


def loss_of(score: Any, model: Any, batch: Any, **options: Any) -> torch.Tensor:
    scores = score(model, getattr(model, "get_base_model", lambda: model)(), batch, **options)
    logps, entropies = scores.logps_S, scores.entropies_S
    weights = torch.linspace(0.5, 1.5, logps.numel(), dtype=logps.dtype).view_as(logps)
    return (weights * logps).sum() + 0.3 * (weights * entropies).sum()


def assert_same_router_counts(score: Any, model: Any, batch: Any) -> None:
    """The router's statistics in a form are those of the padded batch."""
    found = []
    for one in (score_padded, score):
        router = one(model, model, batch, with_router=True).router
        found.append(router_statistics(router.logits, router.counts_BL, 2))
    (chosen, probs, rows), (our_chosen, our_probs, our_rows) = found
    assert rows == our_rows
    assert torch.equal(chosen, our_chosen)
    torch.testing.assert_close(our_probs, probs, rtol=1e-5, atol=1e-5)  # the router's softmax is float32


def gradient(score: Any, model: Any, batch: Any) -> torch.Tensor:
    model.zero_grad()
    loss = loss_of(score, model, batch)
    with packed_attention(model, score is score_packed), cached_under_checkpointing(model, score is score_prefix):
        loss.backward()
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    return torch.cat([part.flatten() for part in parts])
