"""Sizes of models, against counted weights and modules, for every kind of causal language model."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpo_ext.forward.architecture import cached_numbers, experts_of, weight_sizes
from tests.support.architectures import architecture


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


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
    config = CONFIG_MAPPING[kind](num_hidden_layers=2, **settings)
    experts, active = experts_of(config)
    assert experts > active > 0
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    settings |= {name: active for name in names if hasattr(config, name)}
    whole, few = on_meta(config), on_meta(CONFIG_MAPPING[kind](num_hidden_layers=2, **settings))
    idle = sum(p.numel() for p in whole.parameters()) - sum(p.numel() for p in few.parameters())
    (body, _), (all_of_few, _) = weight_sizes(whole), weight_sizes(few)
    # what is left is the router itself, which has a row (and at times a bias) for each expert
    assert 0 <= body - all_of_few <= 0.03 * body
    assert idle > 0.1 * body
