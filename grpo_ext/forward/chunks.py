"""Scoring: log-probabilities of completions in chunks, with positions and without needless padding.

Differs from TRL: `position_ids` are passed (absolute-position models are right under left padding), and chunks are
trimmed to their own longest row. One place serves the policy, the old and the reference log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..batching.micro_batches import StepSizes, canonical_units, cut_in_order
from ..batching.sizes import group_numbers
from ..runtime.out_of_memory import Halving
from .lm_head import RouterOutput, RouterRequest
from .packed import read_batch, trim
from .positions import position_ids


def with_positions(model: Any) -> Callable[..., Any]:
    """`model` as a function that derives `position_ids` from the attention mask it is given."""

    def forward(**inputs: Any) -> Any:
        return model(position_ids=position_ids(inputs["attention_mask"]), **inputs)

    return forward


@contextmanager
def without_checkpointing(model: Any, checkpointing_kwargs: dict[str, Any] | None) -> Iterator[None]:
    """Inside, `model` does not checkpoint its layers, which would only cost time where there are no gradients."""
    enabled = model.is_gradient_checkpointing
    if enabled:
        model.gradient_checkpointing_disable()
    try:
        yield
    finally:
        if enabled:
            model.gradient_checkpointing_enable(checkpointing_kwargs)


def with_router(model: Callable[..., Any], request: RouterRequest) -> Callable[..., Any]:
    """`model` as a function that keeps its router's output; TRL's scoring keeps only the loss made of it."""

    def forward(**inputs: Any) -> Any:
        output = model(**inputs)
        request.output = RouterOutput(output.router_logits, output.router_counts)
        return output

    return forward


@dataclass(frozen=True)
class Chunking:
    """How `score_in_chunks` cuts a batch.

    Attributes:
        multiple: prompts and completions keep a width that is a multiple of this (`pad_to_multiple_of`).
        max_tokens: tokens per chunk, or None.
        packed: whether the chunks are scored as packs, where a prompt counts once.
        align: from this process's number of chunks to the number to score; further ones repeat and are thrown away.
        units: (rows per group, rows per canonical unit): cut like that whatever the sizes above say, or None.
        halving: cuts a chunk that does not fit into memory.
    """

    multiple: int | None = None
    max_tokens: int | None = None
    packed: bool = False
    align: Callable[[int], int] = int
    units: tuple[int, int] | None = None
    halving: Halving | None = None

    def cut(self, rows: int, batch_size: int, lengths: tuple[list[int], list[int], list[bool]]) -> list[slice]:
        """The chunks of a batch of `rows` rows, in order."""
        if self.units is None:
            return cut_in_order(*lengths, batch_size, self.max_tokens, self.packed, self.multiple or 1)
        group, unit = self.units
        sizes = StepSizes(group_numbers(rows, group), [], [])
        return [slice(part[0], part[-1] + 1) for part in canonical_units(sizes, range(rows), unit)]


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
    parts = chunking.cut(rows, batch_size or rows, read_batch(input_ids, attention_mask, logits_to_keep))

    def work(piece: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        part = slice(piece[0], piece[-1] + 1)
        ids, mask, width = trim(input_ids[part], attention_mask[part], logits_to_keep, chunking.multiple)
        scores, entropy, aux_loss = scorer(model, ids, mask, width, **options)
        padding = (0, logits_to_keep - width)
        wide = None if entropy is None else torch.nn.functional.pad(entropy, padding)
        return torch.nn.functional.pad(scores, padding), wide, aux_loss

    logps, entropies, aux_losses = [], [], []
    for number in range(chunking.align(len(parts))):
        part = parts[min(number, len(parts) - 1)]
        piece = range(part.start, part.stop)
        results = [work(piece)] if chunking.halving is None else chunking.halving.run(piece, work)
        if number >= len(parts):
            continue
        logps += [scores for scores, _, _ in results]
        entropies += [entropy for _, entropy, _ in results if entropy is not None]
        aux_losses += [aux_loss for _, _, aux_loss in results if aux_loss is not None]
    return (
        torch.cat(logps),
        torch.cat(entropies) if entropies else None,
        torch.stack(aux_losses).mean() if aux_losses else None,
    )
