"""Sizes of models, against counted weights and modules, for every kind of causal language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_ext.forward.architecture import (
    attention_sizes,
    cached_numbers,
    experts_of,
    token_cost,
    weight_sizes,
)
from grpo_ext.tools.plan import measure
from tests.support.architectures import architecture

GEMMA4 = ["gemma4_text", "gemma4_unified_text"]


def config_of(kind: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[kind](**{"num_hidden_layers": 2, **changes})


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def every_model() -> dict[str, Any]:
    """A model of every kind of causal language model whose default configuration is valid."""
    models = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for settings in ({"num_hidden_layers": 2}, {}):
            try:
                models[kind] = on_meta(CONFIG_MAPPING[kind](**settings))
                break
            except Exception:  # sizes that do not fit this kind, or a library that is not there
                continue
    return models


@pytest.mark.full  # it builds every model of transformers
def test_every_kind_of_causal_language_model_has_a_cost():
    models = every_model()
    assert len(models) > 150
    assert set(GEMMA4) <= set(models)
    broken = {}
    for kind, model in models.items():
        try:
            cost, (body, head) = token_cost(model), weight_sizes(model)
        except Exception as error:
            broken[kind] = repr(error)
            continue
        assert cost.attention >= 0, kind
        assert 0 < body <= sum(p.numel() for p in model.parameters()), kind
        assert head > 0, kind
    assert broken == {}


@pytest.mark.parametrize("kind", GEMMA4)
def test_head_dimensions_that_differ_from_layer_to_layer_are_added_up(kind):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {
        "vocab_size": 64,
        "vocab_size_per_layer_input": 64,
        "hidden_size": 32,
        "head_dim": 8,
        "global_head_dim": 24,
    }
    config = config_of(kind, num_hidden_layers=3, layer_types=kinds, **sizes)
    model = on_meta(config)
    outputs = [module.in_features for path, module in model.named_modules() if path.endswith("o_proj")]
    assert len(set(outputs)) == 2
    width, cached = attention_sizes(config)
    assert width == sum(outputs)
    assert measure(config, compute="float32").cache_bytes == 4 * cached


WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(("kind", "settings"), [("qwen2", {}), ("mistral", {}), ("gemma3_text", WINDOWS)])
def test_a_cache_holds_what_was_counted(kind, settings):
    model, cache = architecture(kind, **settings), None
    for number in range(40):  # token by token: a longer input stays whole until the next
        cache = model(torch.tensor([[5 + number % 20]]), past_key_values=cache, use_cache=True).past_key_values
    numbers = sum(states.numel() for layer in cache.layers for states in (layer.keys, layer.values))
    windows = sum(getattr(layer, "is_sliding", False) for layer in cache.layers)
    # transformers leaves out the last token of a window, which the next one pushes out
    assert cached_numbers(model.config, 40) == numbers + windows * 2 * model.config.num_key_value_heads * 8
    assert (windows > 0) == (kind != "qwen2")


MOE = ["qwen2_moe", "mixtral", "granitemoe", "deepseek_v2", "ernie4_5_moe", "aria_text", "llama4_text", "jetmoe"]


@pytest.mark.parametrize("kind", MOE)
def test_a_token_costs_the_experts_that_run_for_it(kind):
    # against a model whose layers hold no more experts than run for a token
    settings = {"num_experts_per_tok": 2} if kind == "deepseek_v2" else {}  # which has no default
    config = config_of(kind, **settings)
    experts, active = experts_of(config)
    assert experts > active > 0
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    few = config_of(kind, **settings, **{name: active for name in names if hasattr(config, name)})
    all_of_few, _ = weight_sizes(on_meta(few))
    idle = sum(p.numel() for p in on_meta(config).parameters()) - sum(p.numel() for p in on_meta(few).parameters())
    body, _ = weight_sizes(on_meta(config))
    # what is left is the router itself, which has a row (and at times a bias) for each expert
    assert 0 <= body - all_of_few <= 0.03 * body
    assert idle > 0.1 * body


def test_lookup_tables_and_the_head_are_not_part_of_the_body():
    for tied in (True, False):
        model = on_meta(config_of("qwen2", tie_word_embeddings=tied))
        layers = sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()
        assert weight_sizes(model) == (layers, model.lm_head.weight.numel())
    model = on_meta(AutoConfig.for_model("gpt2", n_embd=32, n_head=4, n_layer=2, vocab_size=64))
    assert weight_sizes(model)[0] == sum(p.numel() for p in model.transformer.h.parameters()) + 64
