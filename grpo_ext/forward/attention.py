"""Attention over a pack: every completion sees its prompt and itself, and nothing is computed for what is masked.

Differs from a 4-D mask over the pack: the scores between different completions are never computed. Registered with
transformers under its own name, which a model has only while a pack runs (`packed_attention`); nothing global changes.
Called by every attention layer of a model. Shapes: H heads, N tokens of the pack, D head dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..batching.packing import PackedGroup, PackLayout
from ..errors import ModelError

PACKED = "grpo_ext_packed"
LAYOUT = "grpo_ext_pack"  # keyword that carries the layout through the model to its attention layers
SUPPORTED = ("sdpa", "eager")

# one more call of the attention kernel costs as much as this many (query, key) pairs. CPU: measured, 8 heads of 64.
# Accelerator: an estimate, not measured: 20 microseconds at 100 TFLOP/s
_CALL_COST, _ACCELERATOR_CALL_COST = 2000, 500_000

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# on CUDA: what `torch.nn.attention.varlen` calls, whose own operators change their arguments from version to version.
# Rows (n, H, D), log-sum-exp (H, n); key and value may have fewer heads
_varlen = torch.ops.aten._flash_attention_forward.default
_varlen_backward = torch.ops.aten._flash_attention_backward.default


class TakesNoPacks(ModelError):
    """The model's attention does not follow the layout of a pack, so that completions would see each other."""


def split_is_cheaper(group: PackedGroup, device: torch.device) -> bool:
    """The cost rule for one group: attention by segments, or one dense masked call over prompt and completions.

    Both are counted in (query, key) pairs: a dense call computes all of them, segments only those that are seen, for
    one more call each.
    """
    call_cost = _CALL_COST if device.type == "cpu" else _ACCELERATOR_CALL_COST
    prompt = group.prompt[1] - group.prompt[0]
    lengths = [stop - start for start, stop in group.completions]
    total = prompt + sum(lengths)
    split = prompt**2 / 2 + sum(lengths) * prompt + sum(n**2 for n in lengths) / 2 + call_cost * (1 + len(lengths))
    return split < total**2


@dataclass(frozen=True)
class _Part:
    """One call of a kernel: which tokens of the pack are queries, and which are keys.

    Attributes:
        causal: a segment's attention to itself; else that of completions to their prompt.
        bounds: for several sequences in one call, where each begins and ends among the queries and the keys (int32),
            and the longest of both.
    """

    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    causal: bool
    bounds: tuple[torch.Tensor, torch.Tensor, int, int] | None = None


def _parts(group: PackedGroup) -> Iterator[_Part]:
    """One call for every segment of a group and one for all completions; indices start at the group's first token."""

    def place(tokens: tuple[int, int]) -> slice:
        return slice(tokens[0] - group.prompt[0], tokens[1] - group.prompt[0])

    for segment in (group.prompt, *group.completions):
        if segment[1] > segment[0]:
            yield _Part(place(segment), place(segment), causal=True)
    if group.answers[1] > group.answers[0]:
        yield _Part(place(group.answers), place(group.prompt), causal=False)


def _joint_parts(layout: PackLayout, device: torch.device) -> list[_Part]:
    """Two calls for a whole pack: all segments, and the completions of all prompts."""

    def part(pairs: list[tuple[tuple[int, int], tuple[int, int]]], causal: bool) -> _Part:
        places: list[slice | torch.Tensor] = []
        bounds, longest = [], []
        for ranges in zip(*pairs):
            lengths = [stop - start for start, stop in ranges]
            bounds.append(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device))
            longest.append(max(2, *lengths))  # with 1 and grouped heads the kernel takes every sequence to have 1 query
            first, end = ranges[0][0], ranges[-1][1]
            if end - first == sum(lengths):  # nothing lies between them
                places.append(slice(first, end))
            else:
                places.append(torch.cat([torch.arange(*tokens, device=device) for tokens in ranges]))
        return _Part(places[0], places[1], causal, (bounds[0], bounds[1], longest[0], longest[1]))

    if device not in layout.calls:
        segments = [s for group in layout.groups for s in (group.prompt, *group.completions) if s[1] > s[0]]
        answers = [(group.answers, group.prompt) for group in layout.groups if group.answers[1] > group.answers[0]]
        parts = [part([(s, s) for s in segments], causal=True)]
        layout.calls[device] = parts + ([part(answers, causal=False)] if answers else [])
    return cast("list[_Part]", layout.calls[device])


def _takes_varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the flash kernel for sequences of several lengths takes these states: half precision on CUDA."""
    if query.device.type != "cuda" or torch.version.hip or query.size(-1) % 8:  # AMD's has another log-sum-exp
        return False
    grouped = query.size(1) != key.size(1)
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, grouped))


def _attend(part: _Part, states: tuple[torch.Tensor, ...], scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (1, H, n, D) and log-sum-exp (1, H, n) of one call."""
    if part.bounds is None:
        return _flash(*states, 0.0, part.causal, scale=scale)
    out, lse = _varlen(*(x[0].transpose(0, 1) for x in states), *part.bounds, 0.0, part.causal, False, scale=scale)[:2]
    return out.transpose(0, 1)[None], lse[None]


def _attend_backward(part: _Part, states: tuple[torch.Tensor, ...], scale: float | None) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value; `states` are the gradient of the output, these three, output, log-sum-exp."""
    if part.bounds is None:
        return _flash_backward(*states, 0.0, part.causal, scale=scale)
    *rows, lse = states
    rows = [x[0].transpose(0, 1) for x in rows]
    unused = lse.new_empty(0)  # the random state of dropout
    # the kernel reads the log-sum-exp as if it were contiguous, and does not check
    grads = _varlen_backward(*rows, lse[0].contiguous(), *part.bounds, 0.0, part.causal, unused, unused, scale=scale)
    return tuple(x.transpose(0, 1)[None] for x in grads)


class _SharedPrefixAttention(torch.autograd.Function):
    """Flash attention of a whole pack, in parts joined by their log-sum-exp.

    A completion's attention is that to its prompt and that to itself; two softmaxes over disjoint keys join exactly
    (Dao et al., arXiv 2205.14135, section 3.1). With the joint output and log-sum-exp, the kernel's backward gives each
    part's gradients. Autograd would not: the kernels' backward ignores the gradient of the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        parts: Sequence[_Part],
        scale: float | None,
    ) -> torch.Tensor:
        batch, heads, tokens, dim = query.shape
        out = query.new_empty(batch, tokens, heads, dim).transpose(1, 2)
        # the kernel's log-sum-exp is float32 for half precision
        kind = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.empty(batch, tokens, heads, dtype=kind, device=query.device).transpose(1, 2)
        for part in parts:  # a token's own part comes before what it sees of its prompt
            rows = part.queries
            states = query[:, :, rows], key[:, :, part.keys], value[:, :, part.keys]
            result, result_lse = _attend(part, states, scale)
            if not part.causal:
                joint = torch.logaddexp(lse[:, :, rows], result_lse)
                share = torch.exp(result_lse - joint).unsqueeze(-1).to(out.dtype)
                result, result_lse = torch.lerp(out[:, :, rows], result, share), joint
            out[:, :, rows], lse[:, :, rows] = result, result_lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        for part in ctx.parts:
            rows, keys = part.queries, part.keys
            states = grad[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys], out[:, :, rows]
            pieces = _attend_backward(part, (*states, lse[:, :, rows]), ctx.scale)
            for whole, place, piece in zip(grads, (rows, keys, keys), pieces):
                if part.causal:
                    whole[:, :, place] = piece
                else:
                    whole[:, :, place] += piece
        return (*grads, None, None)


def seen_mask(group: PackedGroup, window: int | None, device: torch.device) -> torch.Tensor:
    """Which tokens of a group see which, (n, n) for the n tokens of prompt and completions, rows are queries.

    A completion's tokens see the whole prompt and what comes before them in the same completion.

    Args:
        window: a query sees keys less than this many positions back; None without a sliding window.
    """
    start, stop = group.prompt[0], max(group.answers[1], group.prompt[1])
    segment = torch.zeros(stop - start, dtype=torch.long, device=device)  # 0: the prompt
    position = torch.arange(stop - start, device=device)
    for number, (first, last) in enumerate(group.completions, start=1):
        segment[first - start : last - start] = number
        position[first - start : last - start] -= first - group.prompt[1]
    back = position[:, None] - position[None, :]
    mask = (back >= 0) & ((segment[:, None] == segment[None, :]) | (segment[None, :] == 0))
    return mask if window is None else mask & (back < window)


def _reference(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    """The model's own attention function of that name."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def _masked(
    module: torch.nn.Module,
    name: str,
    states: tuple[torch.Tensor, ...],
    mask: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """The model's own attention under a boolean mask (queries, keys); returns (1, queries, H, D)."""
    query = states[0]
    full = mask[None, None]
    if name == "eager":  # adds its mask
        full = torch.zeros_like(full, dtype=query.dtype).masked_fill(~full, torch.finfo(query.dtype).min)
    return _reference(module, name)(module, *states, full, **options)[0]


def _longest(layout: PackLayout) -> int:
    """Tokens of the longest prompt with one of its completions."""
    return max(g.prompt[1] - g.prompt[0] + max((b - a for a, b in g.completions), default=0) for g in layout.groups)


def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a pack, for transformers' `AttentionInterface`.

    Args:
        query, key, value: (1, H, N, D); key and value may have fewer heads.

    Returns:
        The output (1, N, H, D), and None for the weights.

    Raises:
        TakesNoPacks: the model keeps the layout from its attention layers, or makes a mask of its own.
    """
    name, has_mask = cast(Any, module).config.grpo_ext_attention, isinstance(attention_mask, torch.Tensor)
    if LAYOUT not in options and has_mask:
        # a padded batch of `plain_attention`, whose layers gradient checkpointing runs again
        return _reference(module, name)(module, query, key, value, attention_mask, **options)
    if LAYOUT not in options:
        raise TakesNoPacks(
            f"{type(module).__name__} is not given the layout of a pack (the model does not pass it to its layers)"
        )
    if has_mask:  # which may hold a window that is longer than the completions compared
        raise TakesNoPacks(f"{type(module).__name__} attends under a mask that the model makes without transformers")
    layout: PackLayout = options.pop(LAYOUT)
    # the mask of transformers decides, as in the model's own attention; without one, the layer's setting
    window = (attention_mask or None) if isinstance(attention_mask, int) else options.get("sliding_window")
    layout.readers.add(module)
    window = None if window is None or window >= _longest(layout) else window
    fast = (
        name == "sdpa"
        and window is None
        and not options.get("dropout")
        and not any(options.get(extra) is not None for extra in ("softcap", "position_bias", "s_aux"))
        and query.size(-1) == value.size(-1)
    )
    if fast:
        query, key, value = _as_sdpa_takes_them(query, key, value)
        if _takes_varlen(query, key, value):
            parts, scale = _joint_parts(layout, query.device), options.get("scaling")
            return _SharedPrefixAttention.apply(query, key, value, parts, scale).transpose(1, 2), None
    sizes = [max(group.answers[1], group.prompt[1]) - group.prompt[0] for group in layout.groups]
    groups = zip(layout.groups, *(x.split(sizes, dim=2) for x in (query, key, value)))
    on_cpu = fast and query.device.type == "cpu"
    return torch.cat([_of_group(module, name, g, s, window, on_cpu, **options) for g, *s in groups], dim=1), None


def _of_group(
    module: torch.nn.Module,
    name: str,
    group: PackedGroup,
    states: Sequence[torch.Tensor],
    window: int | None,
    by_kernel: bool,
    **options: Any,
) -> torch.Tensor:
    """Attention of one group, computed the same whatever other groups the pack has: (1, tokens of the group, H, D).

    Args:
        states: query, key and value of its tokens.
        by_kernel: torch's flash kernel of the CPU may run.
    """
    query, key, value = states
    if not split_is_cheaper(group, query.device):
        mask = seen_mask(group, window, query.device)
        return _masked(module, name, (query, key, value), mask, **options)
    if by_kernel:
        if (repeats := query.size(1) // key.size(1)) > 1:  # this kernel takes no grouped heads
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        parts = list(_parts(group))
        return _SharedPrefixAttention.apply(query, key, value, parts, options.get("scaling")).transpose(1, 2)
    # one call for the prompt and one for each completion, whose keys are the prompt's and its own
    base, pieces = group.prompt[0], []
    for start, stop in (group.prompt, *group.completions):
        if stop > start:
            segment, before = slice(start - base, stop - base), slice(0, min(group.prompt[1], start) - base)
            keys, values = (torch.cat([x[:, :, before], x[:, :, segment]], dim=2) for x in (key, value))
            sequence = PackedGroup((0, keys.size(2)), ())
            mask = seen_mask(sequence, window, query.device)[before.stop :]
            pieces.append(_masked(module, name, (query[:, :, segment], keys, values), mask, **options))
    return torch.cat(pieces, dim=1)


def _as_sdpa_takes_them(*states: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cast to autocast's type, as autocast does for `scaled_dot_product_attention` but not for the kernel below it."""
    device = states[0].device.type
    if torch.is_autocast_enabled(device):
        states = tuple(x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in states)
    return (x if x.stride(-1) == 1 else x.contiguous() for x in states)


def _window(*args: Any, local_size: int | None = None, **kwargs: Any) -> int:
    """Replaces transformers' mask by the one thing that the layout does not hold: the sliding window, 0 without one."""
    return local_size or 0


AttentionInterface.register(PACKED, packed_attention_forward)
AttentionMaskInterface.register(PACKED, _window)


def _configs(model: torch.nn.Module, packed: bool) -> list[Any]:
    """The configurations in a model whose attention is that of packs, or another one."""
    configs: Any = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    named = [config for config in configs if getattr(config, "_attn_implementation", None) is not None]
    return [config for config in named if (config._attn_implementation == PACKED) == packed]


@contextmanager
def packed_attention(model: torch.nn.Module) -> Iterator[None]:
    """Inside, `model` runs packs: its attention layers call `packed_attention_forward`. May be nested."""
    configs = [(config, config._attn_implementation) for config in _configs(model, packed=False)]
    for config, name in configs:
        config.grpo_ext_attention = name
    for config, _ in configs:
        config._attn_implementation = PACKED
    try:
        yield
    finally:
        for config, name in configs:
            config._attn_implementation = name
            del config.grpo_ext_attention


@contextmanager
def plain_attention(model: torch.nn.Module) -> Iterator[None]:
    """Inside, `model` attends as it does outside `packed_attention`, for the forward of a padded batch."""
    packing = _configs(model, packed=True)
    for config in packing:
        config._attn_implementation = config.grpo_ext_attention
    try:
        yield
    finally:
        for config in packing:
            config._attn_implementation = PACKED
