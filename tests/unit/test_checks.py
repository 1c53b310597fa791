"""Checks: randomness is found wherever it hides and can be switched off; what depends on the split is refused."""

import copy

import peft
import pytest
import torch
from torch import nn

from grpo_ext.checks.model import random_parts, split_dependence
from grpo_ext.errors import SplitDependentError, refuse_split_dependence
from grpo_ext.upstream.argument_checks import disable_random_parts
from tests.support.tiny import tiny_model


def adapted(config: peft.PeftConfig) -> nn.Module:
    model = peft.get_peft_model(tiny_model("llama"), config).train()
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        nn.init.normal_(parameter, std=0.3)  # an adapter starts as the identity, which hides its dropout
    return model


@torch.no_grad()
def is_random(model: nn.Module) -> bool:
    """Whether forwards in training mode differ."""
    model.train()
    first, *others = (model(torch.arange(2, 14).view(2, 6)).logits for _ in range(9))
    return any(not torch.equal(other, first) for other in others)


RANDOM_MODELS = {
    "attention (Llama)": (
        lambda: tiny_model("llama", attention_dropout=0.3),
        "model.layers.0.self_attn (LlamaAttention): attention_dropout=0.3",
    ),
    "LoHa": (
        lambda: adapted(peft.LoHaConfig(rank_dropout=0.3, target_modules=["q_proj"])),
        "base_model.model.model.layers.0.self_attn.q_proj (Linear): rank_dropout={'default': 0.3}",
    ),
    "router jitter (Mixtral)": (
        lambda: tiny_model("mixtral", num_local_experts=4, router_jitter_noise=0.3),
        "model.layers.0.mlp (MixtralSparseMoeBlock): jitter_noise=0.3",
    ),
}


@pytest.mark.parametrize(("make", "part"), RANDOM_MODELS.values(), ids=RANDOM_MODELS)
def test_random_parts_are_found_with_their_rates_and_disabled(make, part):
    model = make()
    assert is_random(model)
    assert part in list(random_parts(model))
    before = copy.deepcopy(model)
    disable_random_parts(model)
    assert list(random_parts(model)) == []
    assert not is_random(model)
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), before.parameters()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model("gpt2", resid_pdrop=0.1),
        lambda: adapted(peft.LoraConfig(lora_dropout=0.3, target_modules=["q_proj"])),
    ],
)
def test_dropout_that_belongs_to_tokens_is_no_random_part_and_can_be_turned_off(make):
    model = make()
    assert is_random(model)
    assert list(random_parts(model)) == []
    disable_random_parts(model)
    assert not is_random(model)


def test_all_split_dependent_parts_are_reported_together():
    model = nn.Module()
    model.inner, model.drop = nn.Sequential(nn.LayerNorm(4), nn.SyncBatchNorm(4)), nn.Dropout1d(0.25)
    with pytest.raises(SplitDependentError) as caught:
        refuse_split_dependence(split_dependence(model, 3.0), allow=False)
    for part in (
        "drop (Dropout1d): p=0.25",
        "disable_dropout=True, which zeroes every rate",
        "batch normalisation (inner.1 (SyncBatchNorm), 1 in all",
        "neftune_noise_alpha=3.0 adds noise per micro-batch; remove it",
        "allow_split_dependent=True",
    ):
        assert part in str(caught.value)
    assert len(refuse_split_dependence(split_dependence(model, 3.0), allow=True)) == 3
    independent = nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4))
    assert refuse_split_dependence(split_dependence(independent, 0.0), allow=False) == []
