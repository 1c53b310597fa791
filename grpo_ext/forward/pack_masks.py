"""Which tokens of a pack see which: as a dense mask of one group, or FlexAttention's block mask of the whole pack.

A completion's tokens see the whole prompt and what comes before them in the same completion. Used by forward.attention.
"""

from __future__ import annotations

from typing import Any

import torch

from ..batching.packing import PackedGroup, PackLayout


def _segments(group: PackedGroup, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The segment of every token of a group (0: the prompt) and its position in its own sequence."""
    start, stop = group.prompt[0], max(group.answers[1], group.prompt[1])
    prompt = group.prompt[1] - start
    segment = torch.zeros(stop - start, dtype=torch.long, device=device)
    position = torch.arange(stop - start, device=device)
    for number, (first, last) in enumerate(group.completions, start=1):
        segment[first - start : last - start] = number
        position[first - start : last - start] = torch.arange(prompt, prompt + last - first, device=device)
    return segment, position


def seen_mask(group: PackedGroup, window: int | None, device: torch.device) -> torch.Tensor:
    """Which tokens of a group see which, (n, n) for the n tokens of prompt and completions, rows are queries.

    Args:
        window: a query sees keys less than this many positions back; None without a sliding window.
    """
    segment, position = _segments(group, device)
    back = position[:, None] - position[None, :]
    mask = (back >= 0) & ((segment[:, None] == segment[None, :]) | (segment[None, :] == 0))
    return mask if window is None else mask & (back < window)


def block_mask(layout: PackLayout, window: int | None, device: torch.device) -> Any:
    """FlexAttention's mask of a whole pack, which lets its kernel leave out the blocks in which nothing is seen.

    The layers of a forward (and of its recomputation) share it through `layout.masks`.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if window not in layout.masks:
        segments, positions = zip(*(_segments(group, device) for group in layout.groups))
        numbers = [torch.full_like(segment, number) for number, segment in enumerate(segments)]
        spare = layout.tokens - sum(map(len, segments))  # the pack may be filled up
        group_N, segment_N, position_N = (
            torch.nn.functional.pad(torch.cat(parts), (0, spare)) for parts in (numbers, segments, positions)
        )

        def attends(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            same = (segment_N[query] == segment_N[key]) | (segment_N[key] == 0)
            mask = (query >= key) & (group_N[query] == group_N[key]) & same
            return mask if window is None else mask & (position_N[query] - position_N[key] < window)

        size, compiled = layout.tokens, device.type != "cpu"  # uncompiled, all (query, key) pairs are laid out first
        layout.masks[window] = create_block_mask(attends, None, None, size, size, device=device, _compile=compiled)
    return layout.masks[window]
