"""Scoring: log-probabilities of completions through TRL's fused head, with positions and without needless padding.

Differs from TRL: `position_ids` are passed (absolute-position models are right under left padding), and chunks are
trimmed to their own longest row. One place serves the policy, the old and the reference log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..core.micro_batches import cut_in_order
from .attention import LAYOUT
from .checks import position_ids
from .packed_forward import read_batch, trim


def with_positions(model: Any) -> Callable[..., Any]:
    """`model` as a function that derives `position_ids` from the attention mask it is given."""

    def forward(**inputs: Any) -> Any:
        return model(position_ids=position_ids(inputs["attention_mask"]), **inputs)

    return forward


@dataclass(frozen=True)
class RouterOutput:
    """Router logits of one forward, one (tokens, E) tensor per layer, and how often each token counts (B, L).

    That is the attention mask of a padded batch; in a pack a prompt counts once for each of its completions.
    """

    logits: tuple[torch.Tensor, ...]
    counts_BL: torch.Tensor


@contextmanager
def capture_router(model: Any, enabled: bool) -> Iterator[list[RouterOutput]]:
    """Collect the router logits of each forward of a MoE model; TRL's output keeps only the loss made of them."""
    captured: list[RouterOutput] = []
    if not enabled:
        yield captured
        return

    def keep(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        counts = kwargs["attention_mask"]
        if LAYOUT in kwargs:
            counts = torch.tensor(kwargs[LAYOUT].counts_N, device=counts.device).unsqueeze(0)
        captured.append(RouterOutput(output.router_logits, counts))

    handle = model.base_model.register_forward_hook(keep, with_kwargs=True)
    try:
        yield captured
    finally:
        handle.remove()


@dataclass(frozen=True)
class Chunking:
    """How `score_in_chunks` cuts a batch.

    Attributes:
        multiple: prompts and completions keep a width that is a multiple of this (`pad_to_multiple_of`).
        max_tokens: tokens per chunk, or None.
        packed: whether the chunks are scored as packs, where a prompt counts once.
        align: from this process's number of chunks to the number to score; further ones repeat and are thrown away.
    """

    multiple: int | None = None
    max_tokens: int | None = None
    packed: bool = False
    align: Callable[[int], int] = int


def score_in_chunks(
    scorer: Callable[..., Any],
    model: Any,
    chunking: Chunking,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`_get_per_token_logps_and_entropies` over chunks of at most `batch_size` rows, each trimmed.

    Args:
        scorer: TRL's method, or one of engine.packed_forward with its signature.

    Returns:
        Log-probabilities (B, logits_to_keep), entropies alike or None, mean auxiliary loss or None.
    """
    rows = input_ids.size(0)
    prompts, completions, same = read_batch(input_ids, attention_mask, logits_to_keep)
    limits = (batch_size or rows, chunking.max_tokens, chunking.packed, chunking.multiple or 1)
    parts = cut_in_order(prompts, completions, same, *limits)
    logps, entropies, aux_losses = [], [], []
    for number in range(chunking.align(len(parts))):
        part = parts[min(number, len(parts) - 1)]
        ids, mask, width = trim(input_ids[part], attention_mask[part], logits_to_keep, chunking.multiple)
        part_logps, part_entropies, part_aux = scorer(model, ids, mask, width, **options)
        if number >= len(parts):
            continue
        padding = (0, logits_to_keep - width)
        logps.append(torch.nn.functional.pad(part_logps, padding))
        if part_entropies is not None:
            entropies.append(torch.nn.functional.pad(part_entropies, padding))
        if part_aux is not None:
            aux_losses.append(part_aux)
    return (
        torch.cat(logps),
        torch.cat(entropies) if entropies else None,
        torch.stack(aux_losses).mean() if aux_losses else None,
    )
