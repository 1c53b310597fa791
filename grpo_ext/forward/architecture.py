"""The sizes of a model that determine cost and memory, for every architecture.

Configurations differ in names, and some differ from layer to layer; a missing size counts as zero. Read by the trainer
(cost of a token), the memory plan and the bench.
"""

import math
from collections.abc import Iterator
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import nn

from ..batching.micro_batches import TokenCost

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")  # in `layer_types`


def base_model_of(model: Any) -> Any:
    """The transformers model without the wrappers of an engine and PEFT."""
    model = extract_model_from_parallel(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layer_kinds(config: Any) -> list[str]:
    """Kinds in transformers' words; empty if the configuration names none."""
    return [str(kind) for kind in getattr(config.get_text_config(), "layer_types", None) or ()]


def _number(config: Any, *names: str) -> int | None:
    """The first of these settings that is a positive integer; a setting that differs by layer does not count."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError, which older versions lack
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def experts_of(config: Any) -> tuple[int | None, int | None]:
    """The routed experts of a layer, and how many of them run for a token; shared experts do not count."""
    text = config.get_text_config()
    return _number(text, *_EXPERTS), _number(text, *_ACTIVE)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("accelerate", "deepspeed", "grpo_ext", "peft", "torch", "transformers", "trl")


def has_own_hooks(model: nn.Module) -> bool:
    """Whether a user has registered hooks on modules."""
    hooks = (hook for module in model.modules() for kind in _HOOKS for hook in getattr(module, kind).values())
    return any(str(getattr(hook, "__module__", None)).split(".")[0] not in _LIBRARIES for hook in hooks)


def experts_per_token(model: Any) -> int:
    """1 if the configuration does not say."""
    return experts_of(model.config)[1] or 1


def attention_sizes(config: Any) -> tuple[int, int]:
    """Heads times head dimension and numbers cached for a token, summed over attention layers; 0 if unknown."""
    layers = list(attention_layers(config))
    return sum(h * both // 2 for h, _, both, _ in layers), sum(keys * both for _, keys, both, _ in layers)


def cached_numbers(config: Any, tokens: int) -> int:
    """The numbers in the cache of a sequence; a layer with a window holds at most the window."""
    return sum(keys * both * min(tokens, window or tokens) for _, keys, both, window in attention_layers(config))


def shared_key_heads(heads: int, keys: int, size: int, half: bool) -> int:
    """Key and value heads once they are repeated so that `size` processes, which divide `heads`, can share them.

    In `half` precision one for every query head, so that their gradients are rounded and summed as without sharing.
    """
    fewest = math.lcm(keys, size)
    return heads if half and fewest > keys else fewest


def exchanged_numbers(config: Any, size: int, half: bool) -> int:
    """Query, key, value and output of a token in the largest layer, as `size` processes exchange them in a pass."""
    layers = attention_layers(config)
    sent = ((heads + shared_key_heads(heads, keys, size, half)) * both for heads, keys, both, _ in layers)
    return max(sent, default=0)


def attention_layers(config: Any) -> Iterator[tuple[int, int, int, int | None]]:
    """Yields of each attention layer: heads, heads of keys, numbers of a key and a value together, window in tokens."""
    kinds, text = layer_kinds(config), config.get_text_config()
    alike = [text] * (_number(text, "num_hidden_layers") or 0)
    for number, layer in enumerate(text.per_layer_config if getattr(text, "is_heterogeneous", False) else alike):
        kind = kinds[number] if number < len(kinds) else ""
        heads, hidden = _number(layer, "num_attention_heads"), _number(layer, "hidden_size")
        if heads is None or hidden is None or kind in _WITHOUT_ATTENTION:
            continue
        # latent attention: keys and values have different widths, and each product uses one of them
        parts = [_number(layer, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        latent = sum(part for part in parts if part is not None) if None not in parts else None
        both = latent or 2 * (_number(layer, "head_dim") or hidden // heads)
        # as in transformers' cache: without kinds, every layer has the window
        names = {"sliding_attention": ("sliding_window",), "chunked_attention": ("attention_chunk_size",)}
        windows = names.get(kind, () if kinds else ("sliding_window", "attention_chunk_size"))
        yield heads, _number(layer, "num_key_value_heads") or heads, both, _number(layer, *windows)


def weight_sizes(model: Any) -> tuple[int, int]:
    """The weights that a token is multiplied with, in the layers (only experts that run for it) and in the head."""
    experts, active = experts_of(model.config)
    output = getattr(model.get_output_embeddings(), "weight", None)
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    body = 0.0
    for path, parameter in model.named_parameters():
        if parameter is not output and id(parameter) not in tables:
            body += count(parameter) * _active_share(path, parameter, experts, active)
    return round(body), 0 if output is None else count(output)


def count(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # the whole size under ZeRO-3


def _active_share(path: str, parameter: Any, experts: int | None, active: int | None) -> float:
    """The share of a weight that a token is multiplied with: 1, or the share of routed experts that run for it."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    routed = "experts" in path.split(".")  # shared experts have names of their own
    stacked = len(shape) == 3 and (routed or shape[0] == experts)
    number = shape[0] if stacked else experts if routed else None
    return 1.0 if active is None or number is None else min(1.0, active / number)


def token_cost(policy: Any) -> TokenCost:
    (width, _), (body, head) = attention_sizes(policy.config), weight_sizes(policy)
    body = max(body, 1)
    return TokenCost(attention=2 * width / body, head=4 / 3 * head / body)  # the head runs its forward twice
