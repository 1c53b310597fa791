"""Sizes of models: right against counted weights and modules, and found for every kind of causal language model."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_ext.forward.architecture import attention_sizes, cached_numbers, experts_of, token_cost, weight_sizes
from grpo_ext.tools.plan import measure

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
GEMMA4 = ["gemma4_text", "gemma4_unified_text"]


def config_of(kind: str, drop: tuple[str, ...] = (), **changes: Any) -> Any:
    cls = CONFIG_MAPPING[kind]
    known = set(inspect.signature(cls.__init__).parameters) | {f.name for f in dataclasses.fields(cls)}
    sizes = {name: value for name, value in _SMALL.items() if name in known and name not in drop}
    return cls(**{**sizes, **changes})


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def built() -> dict[str, Any]:
    """A small model of every kind of causal language model that can be made from these sizes."""
    found = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for drop in ((), ("head_dim",), ("num_key_value_heads",), ("num_hidden_layers", "head_dim")):
            try:
                found[kind] = on_meta(config_of(kind, drop))
                break
            except Exception:  # sizes that do not fit this kind, or a library that is not there
                continue
    return found


@pytest.mark.full  # it builds every model of transformers
def test_every_kind_of_causal_language_model_has_a_cost():
    models = built()
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
    config = config_of(kind, num_hidden_layers=3, layer_types=kinds, global_head_dim=24)
    model = on_meta(config)
    outputs = [module.in_features for path, module in model.named_modules() if path.endswith("o_proj")]
    assert len(set(outputs)) == 2
    width, cached = attention_sizes(config)
    assert width == sum(outputs)
    assert measure(config, compute="float32").cache_bytes == 4 * cached


@pytest.mark.parametrize(("kind", "changes"), [("qwen2", {}), ("mistral", {"sliding_window": 8}), ("gemma3_text", {})])
def test_a_cache_holds_what_was_counted(kind, changes):
    if kind == "gemma3_text":
        changes = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    model, cache = AutoModelForCausalLM.from_config(config_of(kind, **changes)), None
    for number in range(40):  # token by token: a longer input stays whole until the next
        cache = model(torch.tensor([[5 + number % 20]]), past_key_values=cache, use_cache=True).past_key_values
    held = sum(states.numel() for layer in cache.layers for states in (layer.keys, layer.values))
    windows = sum(getattr(layer, "is_sliding", False) for layer in cache.layers)
    # transformers leaves out the last token of a window, which the next one pushes out
    assert cached_numbers(model.config, 40) == held + windows * 2 * model.config.num_key_value_heads * 8
    assert (windows > 0) == (kind != "qwen2")


MOE = ["qwen2_moe", "mixtral", "granitemoe", "deepseek_v2", "ernie4_5_moe", "aria_text", "llama4_text", "jetmoe"]


@pytest.mark.parametrize("kind", MOE)
def test_a_token_costs_the_experts_that_run_for_it(kind):
    # against a model whose layers hold no more experts than run for a token
    config = config_of(kind)
    assert experts_of(config) == (4, 2)
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    few = config_of(kind, **{name: 2 for name in names if hasattr(config, name)})
    all_of_few, _ = weight_sizes(on_meta(few))
    idle = sum(p.numel() for p in on_meta(config).parameters()) - sum(p.numel() for p in on_meta(few).parameters())
    found, _ = weight_sizes(on_meta(config))
    # what is left is the router itself, which has a row (and at times a bias) for each expert
    assert 0 <= found - all_of_few <= 0.03 * found
    assert idle > 0.1 * found


def test_lookup_tables_and_the_head_are_not_part_of_the_body():
    for tied in (True, False):
        model = on_meta(config_of("qwen2", tie_word_embeddings=tied))
        layers = sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()
        assert weight_sizes(model) == (layers, 64 * 32)
    model = on_meta(AutoConfig.for_model("gpt2", n_embd=32, n_head=4, n_layer=2, vocab_size=64))
    assert weight_sizes(model)[0] == sum(p.numel() for p in model.transformer.h.parameters()) + 64


def test_latent_attention_takes_a_product_with_keys_and_one_with_values():
    width, _ = attention_sizes(config_of("deepseek_v3", ("head_dim",)))
    assert width == 2 * 4 * (8 + 8 + 12) // 2


def test_layers_without_attention_have_none():
    one, both = (
        config_of("qwen3_next", layer_types=[kind, "full_attention"]) for kind in ("linear_attention", "full_attention")
    )
    assert 2 * attention_sizes(one)[0] == attention_sizes(both)[0] > 0
