"""The caches of the prefix form: one records the prompts' pass, and completions continue from the other.

Differs from transformers' caches, which grow while a model runs: a layer that runs again reads the same states here, so
gradients flow through them and gradient checkpointing may recompute the layers. Used by forward.forms, inside the
forward of the head (forward.lm_head). Shapes: P prompts of a micro-batch, B completions.
"""

import functools
import inspect
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, cache_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from ..compat import CACHE, DummyLayer
from ..runtime.attributes import temporarily_set_each
from .carried import Carried, carrying

_KNOWN = (
    *(cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, cache_utils.LinearAttentionLayer),
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    *filter(None, [DummyLayer]),
)


class Continuation(SimpleNamespace):
    """The completions' pass, after the prompts' pass; not a dataclass: FSDP copies dataclass arguments."""

    input_ids: torch.Tensor  # (B, T), of the completions, padded on the right
    attention_mask: torch.Tensor  # (B, width of the prompts + T)
    position_ids: torch.Tensor | None  # (B, T) or (3, B, T); None if the model does not take them
    prompt_B: torch.Tensor  # the row of each completion's prompt, int64
    instead: dict[str, torch.Tensor | None]  # arguments that differ from the prompts' pass; None: absent


class _Pass:
    """A cache layer for one pass, which does not grow."""

    prompt_width = 0  # tokens before those of the pass

    def get_seq_length(self) -> int:
        return self.prompt_width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.prompt_width + query_length, 0


class _Recorded(_Pass):
    """Records the prompts' pass."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        size = conv_states.size(-1) if conv_kernel_size is None else conv_kernel_size
        full = torch.nn.functional.pad(conv_states, (max(size - conv_states.size(-1), 0), 0))
        self.conv_states[state_idx] = full[..., -size:]  # type: ignore[attr-defined]
        return full

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        self.recurrent_states[state_idx] = recurrent_states  # type: ignore[attr-defined]
        return recurrent_states


class _Frozen(_Pass):
    """Returns the recorded prompt states of each completion before the new ones; stores nothing."""

    prompt_B: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pairs = (self.keys, key_states), (self.values, value_states)
        return tuple(torch.cat([before.index_select(0, self.prompt_B), new], dim=-2) for before, new in pairs)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        before: torch.Tensor = self.conv_states[state_idx]  # type: ignore[attr-defined]
        return torch.cat([before, conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        return recurrent_states


@functools.cache
def _kind(behaviour: type, layer: type) -> type:
    return type(f"{behaviour.__name__}{layer.__name__}", (behaviour, layer), {})


def _layers(config: Any, behaviour: type) -> list[Any]:
    layers = []
    for layer in DynamicCache(config=config).layers:
        new: Any = object.__new__(_kind(behaviour, cast(type, type(layer))))
        vars(new).update(vars(layer))
        layers.append(new)
    return layers


def why_own_cache(policy: Any) -> str | None:
    """The reason why a model does not run on transformers' default cache, as a clause."""
    if CACHE not in inspect.signature(policy.forward).parameters:
        return f"{type(policy).__name__} has a forward without an argument {CACHE}"
    return None if policy._supports_default_dynamic_cache() else f"{type(policy).__name__} has a cache of its own"


def unknown_layers(config: Any) -> list[str]:
    """The cache layers that the prefix form does not know; "no layers" if the model names none."""
    layers = DynamicCache(config=config).layers
    return sorted({type(layer).__name__ for layer in layers if type(layer) not in _KNOWN}) if layers else ["no layers"]


def _continued(recorded: Cache, config: Any, prompt_B: torch.Tensor, width: int) -> Cache:
    """The cache that completions continue from, with a row of the recorded states for each."""
    layers = _layers(config, _Frozen)
    for layer, record in zip(layers, recorded.layers, strict=True):
        layer.prompt_B, layer.prompt_width = prompt_B, width
        layer.keys, layer.values = getattr(record, "keys", None), getattr(record, "values", None)
        if not hasattr(record, "conv_states"):
            continue
        for name in ("conv_states", "recurrent_states"):
            states = getattr(record, name).items()
            chosen = {i: None if state is None else state.index_select(0, prompt_B) for i, state in states}
            setattr(layer, name, chosen)
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
    return Cache(layers=layers)


def cached_under_checkpointing(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Inside, checkpointed layers get a cache too; transformers drops its own, which grows twice. May be nested."""
    layers = (layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer))
    return temporarily_set_each((layer, {"_can_checkpoint_with_cache": True}) for layer in layers)


def run_after_prompts(
    backbone: Any, prompts: dict[str, Any], completions: Continuation, targets: Any
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Run prompts (the backbone's arguments, padded on the left), and completions after them; `targets`: `Targets`.

    Returns the hidden states of both passes, (tokens, H), the prompts' first, and the router logits of each layer.
    """
    config = backbone.config.get_text_config(decoder=True)
    recorded = Cache(layers=_layers(config, _Recorded))
    passed = {**prompts, "use_cache": False, "return_dict": True}  # or the model would create a cache
    with carrying(backbone, Carried.of(targets, prompts["input_ids"])):
        first = backbone(**passed, **{CACHE: recorded})
    passed |= {"input_ids": completions.input_ids, "attention_mask": completions.attention_mask, **completions.instead}
    if completions.position_ids is not None:
        passed["position_ids"] = completions.position_ids
    cache = _continued(recorded, config, completions.prompt_B, prompts["input_ids"].size(1))
    with carrying(backbone, Carried.of(targets, completions.input_ids, prompts["input_ids"].numel())):
        second = backbone(**passed, **{CACHE: cache})
    outputs = (first, second)
    hidden = torch.cat([output.last_hidden_state.flatten(0, 1) for output in outputs])
    routers = zip(*(getattr(output, "router_logits", None) or () for output in outputs), strict=True)
    return hidden, tuple(torch.cat([part.flatten(0, -2) for part in layer]) for layer in routers)
