"""Checks: randomness is found wherever it hides and can be switched off; bad models and data are refused by name."""

import copy

import peft
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import GPT2Config, LlamaConfig

from grpo_ext.checks.data import check_prompt_lengths, check_prompts
from grpo_ext.checks.model import disable_random_parts, random_parts, split_dependence
from grpo_ext.errors import DataError, SplitDependentError, refuse_split_dependence
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


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"prompt": []}, "the training data set is empty"),
        (
            {"question": ["a"], "answer": ["b"]},
            r"has no 'prompt' column; it has question, answer; .*rename_column\('question', 'prompt'\)",
        ),
        (
            {"prompt": ["a"], "completions": ["b"]},
            "has a column 'completions', a name under which reward functions get what was sampled",
        ),
        ({"prompt": [[{"role": "user", "content": "hi"}], []]}, r"row 1 .* has an empty prompt \(\[\]\)"),
    ],
)
def test_data_without_prompts_is_refused_with_the_row(data, says):
    with pytest.raises(DataError, match=says):
        check_prompts(Dataset.from_dict(data), "training")


@pytest.mark.parametrize(
    ("config", "room"),  # of learned positions the completion takes some
    [(GPT2Config(n_positions=64), 54), (LlamaConfig(max_position_embeddings=64), 64)],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_prompt_may_fill_the_room_and_not_one_token_more(config, room):
    def surveyed(*prompts):
        return check_prompts(Dataset.from_dict({"prompt": prompts}), "training")

    def lengths(prompts: list[str]) -> list[int]:  # a character is a token
        return [len(prompt) for prompt in prompts]

    check_prompt_lengths(surveyed("x" * room), lengths, config, max_completion_length=10)
    with pytest.raises(DataError, match=f"row 1 has {room + 1} tokens, .*room for {room} .*max_position_embeddings=64"):
        check_prompt_lengths(surveyed("a", "x" * (room + 1)), lengths, config, max_completion_length=10)
