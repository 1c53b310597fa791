"""Checks: randomness is found wherever it hides and can be switched off; bad models and data are refused by name."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
import transformers
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig

from grpo_ext.checks.data import check_prompt_lengths, check_prompts, model_length_limit
from grpo_ext.checks.model import disable_random_parts, random_parts, refuse, split_dependence
from grpo_ext.errors import DataError, SplitDependentError
from grpo_ext.forward.forms import accepts_positions

IDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
ROTARY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    **IDS,
}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, **IDS}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def build(config) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).train()


def llama(**options) -> nn.Module:
    return build(LlamaConfig(**{**ROTARY, **options}))


def gpt2(**options) -> nn.Module:
    return build(GPT2Config(**{**GPT2, **options}))


def mixtral() -> nn.Module:
    return build(MixtralConfig(**ROTARY, num_local_experts=4, router_jitter_noise=0.3))


def opt() -> nn.Module:
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    drop = {"dropout": 0.1, "layerdrop": 0.5}
    return build(OPTConfig(**sizes, **drop, **IDS, word_embed_proj_dim=16, max_position_embeddings=64))


def falcon() -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return build(transformers.FalconConfig(**sizes, **IDS, hidden_dropout=0.3))


def adapted(config: peft.PeftConfig) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BOFT: no CUDA extension
        model = peft.get_peft_model(llama(), config).train()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)  # an adapter starts as the identity, which hides its dropout
    return model


def is_random(model: nn.Module) -> bool:
    """Whether forwards in training mode differ."""
    inputs = torch.arange(2, 14).view(2, 6)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        first = model(inputs).logits
        return any(not torch.equal(model(inputs).logits, first) for _ in range(8))


# ---- Dropout --------------------------------------------------------------------------------------------------------

RANDOM_MODELS = {
    "modules (GPT-2)": (gpt2, "transformer.h.0.mlp.dropout (Dropout): p=0.1"),
    "functional attribute (Llama)": (
        lambda: llama(attention_dropout=0.2),
        "model.layers.0.self_attn (LlamaAttention): attention_dropout=0.2",
    ),
    "LoRA": (
        lambda: adapted(peft.LoraConfig(lora_dropout=0.3, target_modules=["q_proj"])),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_dropout.default (Dropout): p=0.3",
    ),
    "router jitter (Mixtral)": (mixtral, "model.layers.0.mlp (MixtralSparseMoeBlock): jitter_noise=0.3"),
    "layer drop (OPT)": (opt, "model.decoder (OPTDecoder): layerdrop=0.5"),
}
RANDOM = pytest.mark.parametrize(("make", "part"), RANDOM_MODELS.values(), ids=RANDOM_MODELS)


@RANDOM
def test_random_parts_are_found_with_their_rates_and_disabled(make, part):
    model = make()
    assert is_random(model)
    assert part in list(random_parts(model))
    before = copy.deepcopy(model)
    disable_random_parts(model)
    assert list(random_parts(model)) == []
    assert not is_random(model)
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), before.parameters()))


UNSEEN = {
    "LoHa rank dropout": lambda: adapted(peft.LoHaConfig(r=4, rank_dropout=0.5, target_modules=["q_proj"])),
    "BOFT": lambda: adapted(peft.BOFTConfig(boft_block_size=4, boft_dropout=0.5, target_modules=["q_proj"])),
    "whole number": lambda: nn.Sequential(nn.Dropout(1)),
}


@pytest.mark.parametrize("make", UNSEEN.values(), ids=UNSEEN)
def test_dropout_of_other_kinds_is_found(make):
    assert list(random_parts(make())) != []


def test_a_rate_that_is_read_from_the_config_is_disabled_too():
    model = falcon()
    assert is_random(model)
    disable_random_parts(model)
    assert not is_random(model)


@pytest.mark.parametrize("make", [llama, lambda: gpt2(**NO_DROPOUT)])
def test_a_model_without_dropout_has_no_random_part(make):
    model = make()
    assert not is_random(model)
    assert list(random_parts(model)) == []
    assert split_dependence(model, None) == []


# ---- What depends on the split --------------------------------------------------------------------------------------


def test_everything_that_depends_on_the_split_is_told_at_once():
    model = nn.Module()
    model.inner, model.drop = nn.Sequential(nn.LayerNorm(4), nn.SyncBatchNorm(4)), nn.Dropout(0.25)
    with pytest.raises(SplitDependentError) as caught:
        refuse(split_dependence(model, 3.0), allow=False)
    for part in (
        "drop (Dropout): p=0.25",
        "set disable_dropout=True",
        "batch normalisation (inner.1 (SyncBatchNorm), 1 in all",
        "neftune_noise_alpha=3.0 adds noise per micro-batch; remove it",
        "allow_split_dependent=True",
    ):
        assert part in str(caught.value)
    assert len(refuse(split_dependence(model, 3.0), allow=True)) == 3
    assert refuse(split_dependence(nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4)), 0.0), allow=False) == []


# ---- Models ---------------------------------------------------------------------------------------------------------


def test_position_ids_are_passed_only_to_models_that_take_them():
    assert accepts_positions(llama())
    assert accepts_positions(gpt2())
    assert not accepts_positions(bloom())


def bloom() -> nn.Module:
    config = transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2, **IDS)
    return build(config)


# ---- Data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"prompt": []}, "data set is empty; it needs at least one row with a 'prompt'"),
        (
            {"question": ["a"], "answer": ["b"]},
            r"has no 'prompt' column; it has question, answer; .*rename_column\('question', 'prompt'\)",
        ),
        (
            {"prompt": ["p"] * 1000 + [""] + ["p"] * 1000},
            r"row 1000 of the training data set has an empty prompt \(''\)",
        ),
        ({"prompt": [[{"role": "user", "content": "hi"}], []]}, r"row 1 .* has an empty prompt \(\[\]\)"),
        ({"prompt": ["a", None]}, r"row 1 .* has an empty prompt \(None\)"),
    ],
)
def test_data_without_prompts_is_refused_with_the_row(columns, says):
    with pytest.raises(DataError, match=says):
        check_prompts(Dataset.from_dict(columns), "training")


def test_good_prompts_and_streams_pass():
    check_prompts(Dataset.from_dict({"prompt": ["a", "b"]}), "training")
    check_prompts(Dataset.from_dict({"prompt": [[{"role": "user", "content": "hi"}]]}), "training")
    check_prompts(Dataset.from_dict({"prompt": ["a", ""]}).to_iterable_dataset(), "training")  # checked when it is read


class Lengths:
    """Counts characters as tokens, and how many prompts it was asked about."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, prompts: list[str]) -> list[int]:
        self.asked += len(prompts)
        return [len(p) for p in prompts]


@pytest.mark.parametrize(
    ("config", "room"),  # of learned positions the completion takes some
    [(GPT2Config(**GPT2), 54), (LlamaConfig(**ROTARY), 64)],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_prompt_may_fill_the_room_and_not_one_token_more(config, room):
    check_prompt_lengths(["x" * room], Lengths(), config, max_completion_length=10)
    with pytest.raises(DataError, match=f"row 1 has {room + 1} tokens, .*room for {room} .*max_position_embeddings=64"):
        check_prompt_lengths(["a", "x" * (room + 1)], Lengths(), config, max_completion_length=10)


def test_only_prompts_that_could_be_too_long_are_tokenised():
    lengths, config = Lengths(), LlamaConfig(**{**ROTARY, "max_position_embeddings": 1024})
    check_prompt_lengths(["short"] * 500 + ["x" * 900] * 3, lengths, config, 10)
    assert lengths.asked == 3


def test_a_prompt_of_many_bytes_is_not_mistaken_for_a_short_one():
    # 400 characters of 4 bytes each may be 1600 tokens
    config = LlamaConfig(**{**ROTARY, "max_position_embeddings": 1024})
    with pytest.raises(DataError, match="row 0 has 1600 tokens"):
        check_prompt_lengths(["🙂" * 400], lambda batch: [len(p.encode()) for p in batch], config, 10)


def test_a_model_without_a_limit_takes_any_prompt():
    config = bloom().config
    assert model_length_limit(config)[0] is None
    lengths = Lengths()
    check_prompt_lengths(["x" * 10**5], lengths, config, 10)
    assert lengths.asked == 0
