"""Adapters: low-rank ones train alike for every split; those that add tokens or mix rows are refused."""

from typing import Any

import peft
import pytest
import torch

from grpo_ext.errors import ModelError, SplitDependentError
from grpo_ext.forward import choice
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.trainers import LORA, change, error, far
from tests.tolerances import DIFFERENT, UPDATE

_TARGETS = {"target_modules": ["q_proj", "v_proj"]}


def make(folder, adapter, model=None, **settings):
    return far(folder, model or tiny_model("llama"), **{"learning_rate": 5.0, "adapter": adapter, **settings})


def update(folder, adapter, **settings) -> torch.Tensor:
    return change(make(folder, adapter, **settings))


@pytest.mark.full
def test_an_adapter_that_looks_for_tokens_in_the_prompt_trains_with_default_settings(tmp_path, caplog):
    # aLoRA: active from the invocation tokens of a row on
    tokens = tiny_tokenizer()(">").input_ids  # which every prompt ends with

    def adapter() -> Any:
        return peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=tokens, **_TARGETS)

    whole = update(tmp_path, adapter(), per_device_train_batch_size=16)
    assert "looks for tokens in every row" in caplog.text
    assert error(whole, update(tmp_path, adapter())) <= UPDATE
    other = peft.LoraConfig(task_type="CAUSAL_LM", **_TARGETS)
    assert error(whole, update(tmp_path, other)) > DIFFERENT  # it was active from there on only


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (lambda: peft.LilyConfig(task_type="CAUSAL_LM", **_TARGETS), "LILY.* averages its router"),
        (lambda: peft.PveraConfig(task_type="CAUSAL_LM", **_TARGETS), "PVERA.* draws noise"),
    ],
    ids=["lily", "pvera"],
)
def test_an_adapter_that_depends_on_the_micro_batch_is_refused(tmp_path, monkeypatch, adapter, words):
    with pytest.raises(SplitDependentError, match=words):
        make(tmp_path, adapter())
    # else the comparison of forms finds a router that averages over rows, and runs them one by one
    monkeypatch.setattr(choice, "why_form_fails", lambda *args: None)
    whole, rows = (
        update(tmp_path, adapter(), per_device_train_batch_size=size, allow_split_dependent=True, learning_rate=0.1)
        for size in (16, 3)
    )
    assert error(whole, rows) > DIFFERENT  # it is refused for a reason


def test_an_adapter_that_was_loaded_for_inference_is_refused_before_training(tmp_path):
    peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(**LORA)).save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapter")
    trainer = make(tmp_path, None, model=loaded)
    with pytest.raises(ModelError, match="is_trainable=True"):
        trainer.train()
