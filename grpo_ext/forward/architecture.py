"""The sizes of a model that costs and memory follow from, for every architecture.

Configurations differ in names and some differ from layer to layer; what one does not say is left out, never guessed.
Read by the trainer (costs of tokens), the memory plan and the bench.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..batching.micro_batches import TokenCost

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")  # in `layer_types`


def layer_configs(config: Any) -> list[Any]:
    """The text configuration of every layer; empty where it does not say how many there are."""
    text = config.get_text_config()
    layers = _number(text, "num_hidden_layers")
    if layers is None:
        return []
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text] * layers


def layer_kinds(config: Any) -> list[str]:
    """The kind of every layer, in transformers' words; empty where the configuration names none."""
    return [str(kind) for kind in getattr(config.get_text_config(), "layer_types", None) or ()]


def _number(config: Any, *names: str) -> int | None:
    """The first of these settings that is a positive whole number; a setting that differs by layer is none."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError, which older versions lack
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def experts_of(config: Any) -> tuple[int | None, int | None]:
    """Routed experts of a layer and how many of them run for a token; shared experts always run and are not among."""
    text = config.get_text_config()
    return _number(text, *_EXPERTS), _number(text, *_CHOSEN)


def experts_per_token(model: Any) -> int:
    """How many routed experts run for a token; 1 where the configuration does not say."""
    return experts_of(model.config)[1] or 1


@dataclass(frozen=True)
class AttentionSizes:
    """Attention of all layers together.

    Attributes:
        layers: layers that attend to all tokens or a window of them; recurrent ones do not.
        width: heads times head dimension, summed over these layers.
        cached: numbers kept of a token (keys and values), summed over these layers.
    """

    layers: int = 0
    width: int = 0
    cached: int = 0


def attention_sizes(config: Any) -> AttentionSizes:
    """From a configuration; zero where it does not say."""
    kinds = layer_kinds(config)
    layers = width = cached = 0
    for number, layer in enumerate(layer_configs(config)):
        kind = kinds[number] if number < len(kinds) else ""
        heads, hidden = _number(layer, "num_attention_heads"), _number(layer, "hidden_size")
        if heads is None or hidden is None or kind in _WITHOUT_ATTENTION:
            continue
        # latent attention: keys and values of different widths, of which both products take one each
        parts = [_number(layer, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        latent = sum(part for part in parts if part is not None) if None not in parts else None
        both = latent or 2 * (_number(layer, "head_dim") or hidden // heads)
        layers += 1
        width += heads * both // 2
        cached += (_number(layer, "num_key_value_heads") or heads) * both
    return AttentionSizes(layers, width, cached)


@dataclass(frozen=True)
class WeightSizes:
    """Weights that a token is multiplied with: in the layers (of experts, those that run for it) and in the head."""

    body: int
    head: int


def weight_sizes(model: Any) -> WeightSizes:
    """Counted in the weights of a causal language model; lookup tables are not multiplied with."""
    experts, chosen = experts_of(model.config)
    output = getattr(model.get_output_embeddings(), "weight", None)
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    body = 0.0
    for path, parameter in model.named_parameters():
        if parameter is not output and id(parameter) not in tables:
            body += _count(parameter) * _active_share(path, parameter, experts, chosen)
    return WeightSizes(round(body), 0 if output is None else _count(output))


def _count(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # whole also where ZeRO-3 has cut it


def _active_share(path: str, parameter: Any, experts: int | None, chosen: int | None) -> float:
    """Share of a weight that works on one token: 1, or that of the routed experts which are chosen."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    routed = "experts" in path.split(".")  # shared experts have names of their own
    stacked = len(shape) == 3 and (routed or shape[0] == experts)
    number = shape[0] if stacked else experts if routed else None
    return 1.0 if chosen is None or number is None else min(1.0, chosen / number)


def token_cost(policy: Any) -> TokenCost:
    """What a token costs in this model, from the sizes in its configuration and its weights."""
    attention, weights = attention_sizes(policy.config), weight_sizes(policy)
    return TokenCost.of_model(attention.width, weights.body, weights.head)
