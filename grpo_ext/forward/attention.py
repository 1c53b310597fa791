"""Attention over a pack: every completion sees its prompt and itself, and nothing is computed for what is masked.

Differs from a 4-D mask over the pack: the scores between different completions are never computed. Registered with
transformers under a name that a model has only while a pack runs (`packed_attention`); nothing global changes.
Torch's flash kernels are called in forward.shared_prefix. Shapes: H heads, N tokens of the pack, D head dimension.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..batching.packing import PackedGroup, PackLayout
from ..errors import ModelError
from ..runtime.attributes import temporarily_set_each
from ..runtime.transfer import to_device
from .architecture import attention_layers
from .shared_prefix import Part, SharedPrefixAttention, joint_parts, parts_of, takes_varlen
from .token_slice import LocalHeads, States, to_heads, to_tokens

PACKED = "grpo_ext_packed"
LAYOUT = "grpo_ext_pack"  # keyword that carries the layout through the model to its attention layers
SUPPORTED = ("sdpa", "eager")

# one more call of the attention kernel costs as much as this many (query, key) pairs. CPU: measured, 8 heads of 64.
# Accelerator: an estimate, not measured: 20 microseconds at 100 TFLOP/s
_CALL_COST, _ACCELERATOR_CALL_COST = 2000, 500_000


class PackRefused(ModelError):
    """The model's attention does not follow the layout of a pack: completions would see each other."""


def split_is_cheaper(group: PackedGroup, device: torch.device, half: bool) -> bool:
    """Whether attention by segments costs less than one dense masked call; both counted in (query, key) pairs.

    In `half` precision the two round differently, so a part of a group is decided like the whole group.
    """
    call_cost = _CALL_COST if device.type == "cpu" else _ACCELERATOR_CALL_COST
    prompt = group.prompt[1] - group.prompt[0]
    lengths = group.lengths if half else [stop - start for start, stop in group.completions]
    total = prompt + sum(lengths)
    split = prompt**2 / 2 + sum(lengths) * prompt + sum(n**2 for n in lengths) / 2 + call_cost * (1 + len(lengths))
    return split < total**2


def visible_mask(group: PackedGroup, window: int | None, device: torch.device) -> torch.Tensor:
    """The mask (n, n) of a prompt and its completions, True where a query (row) sees a key."""
    start, stop = group.prompt[0], max(group.answers[1], group.prompt[1])
    segment = torch.zeros(stop - start, dtype=torch.long, device=device)  # 0: the prompt
    position = torch.arange(stop - start, device=device)
    for number, (first, last) in enumerate(group.completions, start=1):
        segment[first - start : last - start] = number
        position[first - start : last - start] -= first - group.prompt[1]
    back = position[:, None] - position[None, :]
    mask = (back >= 0) & ((segment[:, None] == segment[None, :]) | (segment[None, :] == 0))
    return mask if window is None else mask & (back < window)


def _reference(module: nn.Module, name: str) -> Callable[..., Any]:
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def _effective_window(layout: PackLayout, window: int | None) -> int | None:
    """The sliding window; None where it is as long as every sequence, and so hides nothing."""
    return None if window is None or window >= layout.longest else window


def joint_parts_by_window(layout: PackLayout, config: Any) -> dict[int | None, list[Part]]:
    """The kernel calls for a whole pack, by the windows of a model's layers; made before, to be copied with it."""
    windows = {_effective_window(layout, window) for *_, window in attention_layers(config)}
    return {window: joint_parts(layout, window) for window in windows}


def _mask_of(
    layout: PackLayout, window: int | None, device: torch.device, dtype: torch.dtype, group: PackedGroup
) -> torch.Tensor:
    """Terms of the scores, (1, 1, n, n): 0 or -inf."""
    key = (group, window, device, dtype)
    if key not in layout.shared:
        mask = visible_mask(group, window, device)
        # kernels of CUDA copy a mask in every call unless its rows begin at multiples of 8 elements
        terms = torch.zeros(len(mask), len(mask) + -len(mask) % 8, dtype=dtype, device=device)[:, : len(mask)]
        layout.shared[key] = terms.masked_fill_(~mask, -torch.inf)[None, None]
    return layout.shared[key]


def _share_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> States:
    """Views (heads of keys, queries of each, n, D): no key and no value is repeated in memory."""
    shared = query[0].unflatten(0, (key.size(1), -1))
    key, value = (x[0, :, None].expand(-1, shared.size(1), -1, -1) for x in (key, value))
    return shared, key, value


def _tokens_first(out: torch.Tensor) -> torch.Tensor:
    """Shape (heads of keys, queries of each, n, D) to (1, n, H, D)."""
    return out.permute(2, 0, 1, 3).flatten(1, 2)[None]


def packed_attention_forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention over a pack, for transformers' `AttentionInterface`: the output (1, N, H, D), and None for the weights.

    Query, key and value are (1, H, N, D); key and value may have fewer heads. Of a pack over several processes N
    counts the tokens of a slice. Raises PackRefused where the model does not pass the layout to its attention layers,
    or builds its own mask.
    """
    name, has_mask = cast(Any, module).config.grpo_ext_attention, isinstance(attention_mask, torch.Tensor)
    if LAYOUT not in options and has_mask:
        # a padded batch of `plain_attention`, whose layers gradient checkpointing recomputes
        return _reference(module, name)(module, query, key, value, attention_mask, **options)
    if LAYOUT not in options:
        raise PackRefused(
            f"{type(module).__name__} is not given the layout of a pack (the model does not pass it to its layers)"
        )
    if has_mask:  # it may hold a window that is longer than the rows that were compared
        raise PackRefused(f"{type(module).__name__} uses a mask that the model builds without transformers")
    layout: PackLayout = options.pop(LAYOUT)
    # as in the model's own attention, the mask of transformers decides, or without one the layer's setting
    window = (attention_mask or None) if isinstance(attention_mask, int) else options.get("sliding_window")
    layout.readers.add(module)
    window = _effective_window(layout, window)
    plain = (
        name == "sdpa"
        and not options.get("dropout")
        and not any(options.get(extra) is not None for extra in ("softcap", "position_bias", "s_aux"))
        and query.size(-1) == value.size(-1)
    )
    states = query, key, value
    if layout.group is not None:
        if options.get("position_bias") is not None:
            raise PackRefused(f"{type(module).__name__} has a bias for each head and position")
        # with a window each call of the kernel casts its own part, so here float32 is exchanged
        exchanged = _as_sdpa_takes_them(*states) if plain and window is None else states
        states = to_heads(layout.group, exchanged, _in_half(query))
    if plain:
        out = _plain(layout, window, states, options.get("scaling"))
    else:
        mask_of = partial(_mask_of, layout, window, query.device, query.dtype)
        kernel, layer = _reference(module, name), cast(Any, module)
        if layout.group is not None:
            layer = LocalHeads(module, layout.group, states)
            if options.get("s_aux") is not None:
                options["s_aux"] = layer.sinks
        attend = partial(kernel, layer, **options)
        out = _by_group(layout, states, lambda *states, mask: attend(*states, mask)[0], mask_of)
    # models reshape it by `view`, as the output of transformers' kernels allows
    return (out if layout.group is None else to_tokens(layout.group, out)).contiguous(), None


def _plain(layout: PackLayout, window: int | None, states: States, scale: float | None) -> torch.Tensor:
    device, cast_states = states[0].device, _as_sdpa_takes_them(*states)
    if takes_varlen(*cast_states):
        if (window, device) not in layout.shared:
            layout.shared[window, device] = to_device(joint_parts(layout, window), device)
        return SharedPrefixAttention.apply(*cast_states, layout.shared[window, device], scale).transpose(1, 2)

    # transformers' function repeats keys and values under a mask
    def attend(*states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = _share_heads(*_as_sdpa_takes_them(*states))
        return _tokens_first(torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale))

    def by_flash(group: PackedGroup, states: Sequence[torch.Tensor]) -> torch.Tensor:
        shared = _share_heads(*_as_sdpa_takes_them(*states))
        return _tokens_first(SharedPrefixAttention.apply(*shared, parts_of(group), scale))

    mask_of = partial(_mask_of, layout, window, device, cast_states[0].dtype)
    return _by_group(layout, states, attend, mask_of, by_flash if window is None and device.type == "cpu" else None)


def _by_group(
    layout: PackLayout,
    states: States,
    attend: Callable[..., torch.Tensor],
    mask_of: Callable[[PackedGroup], torch.Tensor],
    by_flash: Callable[[PackedGroup, Sequence[torch.Tensor]], torch.Tensor] | None = None,  # on CPUs
) -> torch.Tensor:
    """Attention (1, N, H, D), group by group, so that a group does not depend on others in the pack."""
    sizes = [max(group.answers[1], group.prompt[1]) - group.prompt[0] for group in layout.groups]
    outputs, device = [], states[0].device
    half = _in_half(states[0])
    for group, *parts in zip(layout.groups, *(x.split(sizes, dim=2) for x in states), strict=True):
        if not split_is_cheaper(group, device, half):
            outputs.append(attend(*parts, mask=mask_of(group)))
        elif by_flash is not None:
            outputs.append(by_flash(group, parts))
        else:
            mask = mask_of(PackedGroup((0, layout.longest), ()))
            outputs += [attend(*segment, mask=segment_mask) for *segment, segment_mask in _segments(group, parts, mask)]
    return torch.cat(outputs, dim=1)


def _in_half(states: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(states.device.type) or states.element_size() == 2


def _segments(
    group: PackedGroup, states: Sequence[torch.Tensor], mask: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields query, key, value and mask of the prompt, and of each completion with the prompt's keys before its own."""
    query, key, value = states
    base = group.prompt[0]
    for start, stop in (group.prompt, *group.completions):
        if stop > start:
            segment, before = slice(start - base, stop - base), slice(0, min(group.prompt[1], start) - base)
            keys, values = (torch.cat([x[:, :, before], x[:, :, segment]], dim=2) for x in (key, value))
            end = keys.size(2)
            yield query[:, :, segment], keys, values, mask[..., before.stop : end, :end]


def _as_sdpa_takes_them(*states: torch.Tensor) -> States:
    """Autocast casts for `scaled_dot_product_attention`, but not for its kernels."""
    device = states[0].device.type
    if torch.is_autocast_enabled(device):
        states = tuple(x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in states)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in states)
    return query, key, value


def _window(*args: Any, local_size: int | None = None, **kwargs: Any) -> int:
    """The window, or 0, instead of a mask; the rest follows from the layout."""
    return local_size or 0


AttentionInterface.register(PACKED, packed_attention_forward)
AttentionMaskInterface.register(PACKED, _window)


def _configs(model: nn.Module, packed: bool) -> list[Any]:
    """Outer configurations first: one that gets an implementation passes it on to those inside it."""
    configs: Any = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    named = [config for config in configs if getattr(config, "_attn_implementation", None) is not None]
    return [config for config in named if (config._attn_implementation == PACKED) == packed]


def packed_attention(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, `model` runs packs: its attention layers call `packed_attention_forward`. May be nested."""
    configs = reversed(_configs(model, packed=False))
    names = ((config, config._attn_implementation) for config in configs)
    return temporarily_set_each((c, {"grpo_ext_attention": name, "_attn_implementation": PACKED}) for c, name in names)


def plain_attention(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, `model` runs padded batches, also within `packed_attention`."""
    configs = _configs(model, packed=True)
    return temporarily_set_each((config, {"_attn_implementation": config.grpo_ext_attention}) for config in configs)
