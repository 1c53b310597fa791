"""Attention over a pack: every completion sees its prompt and itself, and nothing is computed for what is masked.

Differs from a 4-D mask over the pack: the scores between different completions are never computed. Registered with
transformers under its own name, which a model is given only while a pack runs (`packed_attention`), so nothing global
changes. Called by every attention layer of a model. Shapes: H heads, N tokens of the pack, D head dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..batching.packing import PackedGroup, PackLayout
from ..errors import ModelError

PACKED = "grpo_ext_packed"
LAYOUT = "grpo_ext_pack"  # keyword that carries the layout through the model to its attention layers
FLEX = "flex_attention"
SUPPORTED = ("sdpa", "eager", FLEX)

# one more call of the attention kernel costs as much as this many (query, key) pairs. CPU: measured, 8 heads of 64.
# Accelerator: an estimate, not measured: 20 microseconds at 100 TFLOP/s
_CALL_COST, _ACCELERATOR_CALL_COST = 2000, 500_000

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TakesNoPacks(ModelError):
    """A model that does not read the layout of a pack, so that completions would see each other."""


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


class _SharedPrefixAttention(torch.autograd.Function):
    """Flash attention of whole groups on the CPU, in parts joined by their log-sum-exp.

    A completion's attention is that to its prompt and that to itself; two softmaxes over disjoint keys join exactly
    (Dao et al., arXiv 2205.14135, section 3.1). With the joint output and log-sum-exp, the kernel's backward gives each
    part's gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        groups: tuple[PackedGroup, ...],
        scale: float | None,
    ) -> torch.Tensor:
        batch, heads, tokens, dim = query.shape
        out = query.new_empty(batch, tokens, heads, dim).transpose(1, 2)
        # the kernel's log-sum-exp is float32 for half precision
        kind = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.empty(batch, tokens, heads, dtype=kind, device=query.device).transpose(1, 2)

        def run(queries: slice, keys: slice, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
            part = query[:, :, queries], key[:, :, keys], value[:, :, keys]
            return _flash(*part, 0.0, causal, scale=scale)

        for group in groups:
            prompt, answers = slice(*group.prompt), slice(*group.answers)
            out[:, :, prompt], lse[:, :, prompt] = run(prompt, prompt, True)
            if answers.start == answers.stop:
                continue
            for start, stop in group.completions:
                if stop > start:
                    own = slice(start, stop)
                    out[:, :, own], lse[:, :, own] = run(own, own, True)
            seen, seen_lse = run(answers, prompt, False)
            joint = torch.logaddexp(lse[:, :, answers], seen_lse)
            share = torch.exp(seen_lse - joint).unsqueeze(-1).to(out.dtype)
            out[:, :, answers] = torch.lerp(out[:, :, answers], seen, share)
            lse[:, :, answers] = joint
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.groups, ctx.scale = groups, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = d_query, d_key, d_value = tuple(torch.empty_like(x) for x in (query, key, value))

        def run(queries: slice, keys: slice, causal: bool) -> tuple[torch.Tensor, ...]:
            return _flash_backward(
                grad[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                0.0,
                causal,
                scale=ctx.scale,
            )

        def store(part: slice, values: tuple[torch.Tensor, ...]) -> None:
            for whole, piece in zip(grads, values):
                whole[:, :, part] = piece

        for group in ctx.groups:
            prompt, answers = slice(*group.prompt), slice(*group.answers)
            store(prompt, run(prompt, prompt, True))
            if answers.start == answers.stop:
                continue
            for start, stop in group.completions:
                if stop > start:
                    store(slice(start, stop), run(slice(start, stop), slice(start, stop), True))
            to_query, to_key, to_value = run(answers, prompt, False)
            d_query[:, :, answers] += to_query
            d_key[:, :, prompt] += to_key
            d_value[:, :, prompt] += to_value
        return (*grads, None, None)


def seen_mask(group: PackedGroup, window: int | None, device: torch.device) -> torch.Tensor:
    """Which tokens of a group see which, (n, n) for the n tokens of prompt and completions, rows are queries.

    Args:
        window: a query sees keys less than this many positions back; None without a sliding window.
    """
    start, stop = group.prompt[0], max(group.answers[1], group.prompt[1])
    prompt = group.prompt[1] - start
    segment = torch.zeros(stop - start, dtype=torch.long, device=device)
    position = torch.arange(stop - start, device=device)
    for number, (first, last) in enumerate(group.completions, start=1):
        segment[first - start : last - start] = number
        position[first - start : last - start] = torch.arange(prompt, prompt + last - first, device=device)
    back = position[:, None] - position[None, :]
    mask = (back >= 0) & ((segment[:, None] == segment[None, :]) | (segment[None, :] == 0))
    return mask if window is None else mask & (back < window)


def block_mask(layout: PackLayout, window: int | None, device: torch.device) -> Any:
    """FlexAttention's mask of a whole pack, which lets its kernel leave out the blocks in which nothing is seen.

    The layers of a forward (and of its recomputation) share it through `layout.masks`.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if window not in layout.masks:
        group_N, segment_N, position_N = (torch.zeros(layout.tokens, dtype=torch.long, device=device) for _ in range(3))
        for number, group in enumerate(layout.groups):
            prompt = group.prompt[1] - group.prompt[0]
            group_N[group.prompt[0] : max(group.answers[1], group.prompt[1])] = number
            position_N[slice(*group.prompt)] = torch.arange(prompt, device=device)
            for segment, (start, stop) in enumerate(group.completions, start=1):
                segment_N[start:stop] = segment
                position_N[start:stop] = torch.arange(prompt, prompt + stop - start, device=device)

        def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            own = (segment_N[query] == segment_N[key]) | (segment_N[key] == 0)
            mask = (query >= key) & (group_N[query] == group_N[key]) & own
            return mask if window is None else mask & (position_N[query] - position_N[key] < window)

        size, compiled = layout.tokens, device.type != "cpu"  # uncompiled, all (query, key) pairs are laid out first
        layout.masks[window] = create_block_mask(seen, None, None, size, size, device=device, _compile=compiled)
    return layout.masks[window]


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
        TakesNoPacks: the model keeps the layout from its attention layers.
    """
    if LAYOUT not in options:
        raise TakesNoPacks(
            f"{type(module).__name__} is not given the layout of a pack (the model does not pass further arguments on "
            "to its layers)"
        )
    layout: PackLayout = options.pop(LAYOUT)
    name = cast(Any, module).config.grpo_ext_attention
    # the mask is what the model's own attention would go by; without transformers' masks, what the layer says
    window = (attention_mask or None) if isinstance(attention_mask, int) else options.get("sliding_window")
    layout.readers[module] = window
    longest = max(g.prompt[1] - g.prompt[0] + max((b - a for a, b in g.completions), default=0) for g in layout.groups)
    plain = window is None or window >= longest
    if name == FLEX:
        mask = block_mask(layout, None if plain else window, query.device)
        return _reference(module, name)(module, query, key, value, mask, **options)[0], None
    fast = (
        name == "sdpa"
        and plain
        and query.device.type == "cpu"
        and not options.get("dropout")
        and not any(options.get(extra) is not None for extra in ("softcap", "position_bias", "s_aux"))
        and query.size(-1) == value.size(-1)
    )
    if fast and any(split_is_cheaper(group, query.device) for group in layout.groups):
        query, key, value = _as_sdpa_takes_them(query, key, value)
        repeats = query.size(1) // key.size(1)
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        out = _SharedPrefixAttention.apply(query, key, value, layout.groups, options.get("scaling"))
        return out.transpose(1, 2), None
    parts: list[torch.Tensor] = []
    for group in layout.groups:
        whole = slice(group.prompt[0], max(group.answers[1], group.prompt[1]))
        states = tuple(x[:, :, whole] for x in (query, key, value))
        if split_is_cheaper(group, query.device):
            parts.extend(_by_segment(module, name, group, states, None if plain else window, **options))
        else:
            mask = seen_mask(group, None if plain else window, query.device)
            parts.append(_masked(module, name, states, mask, **options))
    return torch.cat(parts, dim=1), None


def _by_segment(
    module: torch.nn.Module,
    name: str,
    group: PackedGroup,
    states: tuple[torch.Tensor, ...],
    window: int | None,
    **options: Any,
) -> Iterator[torch.Tensor]:
    """One call for the prompt and one for each completion, whose keys are the prompt's and its own."""
    query, key, value = states
    base, prompt = group.prompt[0], group.prompt[1] - group.prompt[0]
    alone = PackedGroup((0, prompt), ())
    head = tuple(x[:, :, :prompt] for x in states)
    yield _masked(module, name, head, seen_mask(alone, window, query.device), **options)
    for start, stop in group.completions:
        if stop == start:
            continue
        own, length = slice(start - base, stop - base), stop - start
        keys, values = (torch.cat([x[:, :, :prompt], x[:, :, own]], dim=2) for x in (key, value))
        sequence = PackedGroup((0, prompt), ((prompt, prompt + length),))
        mask = seen_mask(sequence, window, query.device)[prompt:]
        yield _masked(module, name, (query[:, :, own], keys, values), mask, **options)


def _as_sdpa_takes_them(*states: torch.Tensor) -> Iterator[torch.Tensor]:
    """In autocast's type, which it gives `scaled_dot_product_attention` but not the kernel below it; rows in order."""
    if torch.is_autocast_enabled("cpu"):
        states = tuple(x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype("cpu")) for x in states)
    return (x if x.stride(-1) == 1 else x.contiguous() for x in states)


def _window(*args: Any, local_size: int | None = None, **kwargs: Any) -> int:
    """In the place of a mask, all of it that the layout does not say: the sliding window, 0 where there is none."""
    return local_size or 0


AttentionInterface.register(PACKED, packed_attention_forward)
AttentionMaskInterface.register(PACKED, _window)


def _configs(model: torch.nn.Module) -> list[Any]:
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [c for c in found.values() if getattr(c, "_attn_implementation", None) not in (None, PACKED)]


def runs_packs(policy: Any) -> bool:
    """Whether `packed_attention` is on."""
    return policy.config.get_text_config()._attn_implementation == PACKED


@contextmanager
def packed_attention(model: torch.nn.Module, enabled: bool = True) -> Iterator[None]:
    """Inside, `model` runs packs: its attention layers call `packed_attention_forward`. May be nested.

    The backward pass belongs inside too, because gradient checkpointing runs the layers again.
    """
    configs = [(config, config._attn_implementation) for config in _configs(model)] if enabled else []
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
