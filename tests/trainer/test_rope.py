"""Rotary positions that depend on the length of a forward: one length for a whole run, or a refusal; never silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_ext.checks import trainer as checks
from grpo_ext.errors import DataError, SplitDependentError
from grpo_ext.forward.rope import covered_length
from tests.support.tiny import prompts, tiny_model, tiny_tokenizer
from tests.support.trainers import change, error, far
from tests.tolerances import DIFFERENT, UPDATE

SWITCH = 16  # tokens; prompts have 3 to 10 here, completions up to 12
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
_THETA = {"rope_theta": 1e4}
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **_THETA}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": SWITCH,
    **_THETA,
}
_MIXED = {"sliding_attention": {"rope_type": "default", **_THETA}, "full_attention": _DYNAMIC}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {"max_position_embeddings": 128, "original_max_position_embeddings": SWITCH, "rope_parameters": _LONG},
    ),
    "dynamic_llama": ("llama", {"max_position_embeddings": SWITCH, "rope_parameters": _DYNAMIC}),
    "dynamic_qwen": ("qwen2", {"max_position_embeddings": SWITCH, "rope_parameters": _DYNAMIC}),
    "per_layer_type": (
        "gemma3_text",
        {
            "max_position_embeddings": SWITCH,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _MIXED,
        },
    ),
}
PHIMOE = (
    "phimoe",
    {
        "max_position_embeddings": 128,
        "num_local_experts": 2,
        "router_jitter_noise": 0.0,
        "rope_parameters": {**_LONG, "short_mscale": 1.0, "long_mscale": 1.3},
    },
)


def model_of(spec: tuple[str, dict[str, Any]]) -> Any:
    kind, settings = spec
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(tiny_tokenizer()), **{**_SIZES, **settings})
    return AutoModelForCausalLM.from_config(config)


def make(tmp_path, model, dataset=None, **settings):
    return far(tmp_path, model, 0.1, data=dataset, **settings)


def update(tmp_path, spec, **settings) -> torch.Tensor:
    return change(make(tmp_path, model_of(spec), **settings))


@pytest.mark.parametrize("forward", ["auto", pytest.param("padded", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_does_not_depend_on_the_length_of_a_forward(tmp_path, kind, forward):
    layout = {"forward": forward, "beta": 0.05, "max_steps": 2}
    whole = update(tmp_path, KINDS[kind], per_device_train_batch_size=16, **layout)
    assert error(whole, update(tmp_path, KINDS[kind], per_device_train_batch_size=3, **layout)) <= UPDATE


@pytest.mark.parametrize("kind", ["longrope", "per_layer_type"])
def test_left_alone_the_update_would_depend_on_it(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(checks, "settle_rope", lambda models, longest: None)
    # padded: before its first pack a model is compared in both forms, which notices some of these
    layout = {"forward": "padded"}
    whole, rows = (update(tmp_path, KINDS[kind], per_device_train_batch_size=size, **layout) for size in (16, 1))
    assert error(whole, rows) > DIFFERENT


def logits_while_sampling(model: Any, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of `new` tokens as they are decoded with a cache, and of one forward over all of them."""
    model.eval()
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)
        whole = model(found.sequences).logits[:, ids.size(1) - 1 : -1]
    return torch.stack(found.logits, dim=1), whole


@pytest.mark.parametrize("kind", ["dynamic_qwen", "per_layer_type"])
def test_sampling_scores_what_training_scores(tmp_path, kind):
    ids = torch.randint(3, 30, (2, 8), generator=torch.Generator().manual_seed(0))
    trainer = make(tmp_path, model_of(KINDS[kind]))
    sampled, scored = logits_while_sampling(trainer.model, ids, 12)  # up to 20 tokens, over the switch
    assert torch.allclose(sampled, scored, atol=1e-4)
    sampled, scored = logits_while_sampling(model_of(KINDS[kind]), ids, 12)
    assert not torch.allclose(sampled, scored, atol=1e-2)


def test_the_reference_uses_the_length_of_the_policy(tmp_path, caplog):
    model_of(KINDS["longrope"]).save_pretrained(tmp_path / "start")
    trainer = make(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path / "start"), beta=0.1)
    assert "those of 22 tokens, the longest prompt and max_completion_length" in caplog.text
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_second_run_of_the_same_object_has_its_own_length(tmp_path):
    model, ids = model_of(KINDS["longrope"]), torch.arange(3, 11)[None]
    with torch.no_grad():
        short = model(ids).logits
    make(tmp_path, model)
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, short, atol=1e-2)
    make(tmp_path, model, max_completion_length=SWITCH - 10)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, short, atol=1e-5)


def unknown_lengths() -> dict[str, tuple[Any, dict[str, Any]]]:
    rows = prompts()
    stream = IterableDataset.from_generator(lambda: iter(rows.to_list()))
    transformed = rows.rename_column("prompt", "text").with_transform(lambda b: {"prompt": b["text"]})
    return {
        "stream": (stream, {}),
        "transform": (transformed, {}),
        "no limit": (rows, {"max_completion_length": None}),
    }


@pytest.mark.parametrize("kind", ["stream", "transform", "no limit"])
def test_a_run_whose_lengths_are_not_known_is_refused(tmp_path, kind):
    dataset, settings = unknown_lengths()[kind]
    with pytest.raises(SplitDependentError, match=r"longrope\) depend on .* is not known .* use a data set"):
        make(tmp_path, model_of(KINDS["longrope"]), dataset, **settings)
    make(tmp_path, model_of(KINDS["longrope"]), dataset, allow_split_dependent=True, **settings)
    make(tmp_path, tiny_model(), dataset, **settings)  # nothing to know there


def test_what_cannot_be_set_is_refused_where_the_run_reaches_it(tmp_path):
    with pytest.raises(SplitDependentError, match=r"Phimoe.* reach 22 tokens, beyond where they change"):
        make(tmp_path, model_of(PHIMOE))
    make(tmp_path, model_of(PHIMOE), max_completion_length=SWITCH - 10)


def test_prompts_may_be_as_long_as_the_scaling_covers(tmp_path):
    scaled = {"rope_type": "yarn", "factor": 4.0, **_THETA}
    spec = ("llama", {"max_position_embeddings": 128, "rope_parameters": scaled})
    assert covered_length(model_of(spec).config) == 512
    make(tmp_path, model_of(spec), Dataset.from_dict({"prompt": ["ab"] * 3 + ["a" * 500]}))
    with pytest.raises(DataError, match=r"row 3 has 513 tokens, .* room for 512"):
        make(tmp_path, model_of(spec), Dataset.from_dict({"prompt": ["ab"] * 3 + ["a" * 513]}))
    plain = ("llama", {"max_position_embeddings": 128})
    with pytest.raises(DataError, match=r"row 3 has 500 tokens, .* room for 128"):
        make(tmp_path, model_of(plain), Dataset.from_dict({"prompt": ["ab"] * 3 + ["a" * 500]}))


def test_scaling_by_layer_type_and_by_length_covers_too(tmp_path):
    linear = {**_MIXED, "full_attention": {"rope_type": "linear", "factor": 8.0, **_THETA}}
    kind, settings = KINDS["per_layer_type"]
    assert covered_length(model_of((kind, {**settings, "rope_parameters": linear})).config) == 8 * SWITCH
    assert covered_length(model_of(KINDS["dynamic_llama"]).config) is None
    assert covered_length(model_of(KINDS["longrope"]).config) == 128
    make(tmp_path, model_of(KINDS["dynamic_llama"]), Dataset.from_dict({"prompt": ["ab"] * 3 + ["a" * 500]}))
