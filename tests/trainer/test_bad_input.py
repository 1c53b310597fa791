"""Bad input ends before training with one error that names the values, the rule and the remedy."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from torch import nn

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.errors import ConfigError, DataError, GrpoExtError, ModelError, SplitDependentError
from tests.support.tiny import config_kwargs, prompts, tiny_model
from tests.support.trainers import make

SIZES = [
    ({"global_batch_size": 15}, ["global_batch_size=15", "num_generations=4", "to 12 or 16", "to 60"]),
    ({"global_batch_size": 18, "rollout_batch_size": 54}, ["rollout_batch_size=54", "whole groups", "use 36 or 72"]),
    ({"per_device_eval_batch_size": -1}, ["per_device_eval_batch_size=-1", "1 or more"]),
    ({"gradient_accumulation_steps": 7}, ["gradient_accumulation_steps=7", "derived as 4", "remove"]),
    ({"global_batch_size": None, "per_device_train_batch_size": 5}, ["= 5 completions", "set global_batch_size to"]),
    ({"optim": "adalomo"}, ["optim=adalomo", "use another optimizer"]),
    ({"loss_type": "dr_grpo", "max_completion_length": None}, ["loss_type='dr_grpo'", "which is None", "set it to"]),
    ({"micro_batch_tokens": 0}, ["micro_batch_tokens=0"]),
    ({"loss_type": "grpoo"}, ["loss_type='grpoo'", "dapo"]),
    ({"reward_on_failure": "shrug"}, ["reward_on_failure='shrug'", "'error', 'none'"]),
    ({"reward_timeout": 0}, ["reward_timeout=0", "more than 0"]),
    ({"beta": -0.1}, ["beta=-0.1", "0 or more"]),
    ({"temperature": 0.0}, ["temperature=0.0", "above 0"]),
    ({"top_entropy_quantile": 2.0}, ["top_entropy_quantile=2.0", "from 0 to 1"]),
    ({"tool_timeout": float("inf")}, ["tool_timeout=inf", "None for no limit"]),  # a thread cannot wait for so long
    ({"balance_by_cost": True}, ["no longer has the field 'balance_by_cost'", "leave it out"]),
    ({"reward_workers": 1.5}, ["reward_workers=1.5", "0 or more"]),
]


@pytest.mark.parametrize(("settings", "words"), SIZES, ids=[next(iter(s)) for s, _ in SIZES])
def test_settings_that_break_a_rule_are_refused(tmp_path, settings, words):
    with pytest.raises(ConfigError) as error:
        GRPOConfig(**config_kwargs(tmp_path, **settings))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("kind", ["fused", "hooks"])
def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(tmp_path, kind):
    """In the two ways in which such optimizers do it. Others are taken (test_every_parameter)."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "fused":
        optimizer.fused_backward = lambda loss, lr: None
    else:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.data.sub_(0.1 * p.grad))
    with pytest.raises(ConfigError, match="during the backward pass"):
        make(tmp_path, model=model, optimizers=(optimizer, None))


def test_data_that_cannot_be_trained_on_is_refused(tmp_path):
    with pytest.raises(DataError, match="row 1 of the training data set has an empty prompt"):
        make(tmp_path, train_dataset=Dataset.from_dict({"prompt": ["a", "", "b"]}))


def test_absolute_positions_count_the_completion_too(tmp_path):
    rows = Dataset.from_dict({"prompt": ["ab"] * 3 + ["a" * 120]})
    with pytest.raises(DataError, match=r"row 3 has 120 tokens.*room for 116 .*max_completion_length=12"):
        make(tmp_path, model=tiny_model("gpt2"), train_dataset=rows)
    make(tmp_path, model=tiny_model("qwen2"), train_dataset=rows)  # rotary positions go on


def test_bad_evaluation_data_is_named(tmp_path):
    with pytest.raises(DataError, match="evaluation 'b' data set"):
        make(tmp_path, eval_dataset={"a": prompts(3), "b": Dataset.from_dict({"prompt": []})})


def test_a_model_without_a_head_is_refused(tmp_path):
    bare = transformers.AutoModel.from_config(tiny_model().config)
    with pytest.raises(ModelError, match=r"is a Qwen2Model .*AutoModelForCausalLM"):
        make(tmp_path, model=bare)


def test_a_model_object_without_a_name_needs_its_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="pass the tokenizer as processing_class"):
        make(tmp_path, processing_class=None)


@pytest.mark.parametrize("name", ["runs/nope", "/runs/nope"])
def test_a_model_that_is_neither_a_folder_nor_on_the_hub_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=f"model '{name}' cannot be loaded; check the path or the name"):
        make(tmp_path, model=name, processing_class=None)


def test_settings_can_be_copied_and_changed(tmp_path):
    config = GRPOConfig(**config_kwargs(tmp_path))
    assert copy.copy(config).num_generations == pickle.loads(pickle.dumps(config)).num_generations == 4
    assert dataclasses.replace(config, learning_rate=0.5).learning_rate == 0.5
    with pytest.raises(TypeError, match="num_generation"):
        dataclasses.replace(config, num_generation=2)
    assert inspect.signature(GRPOConfig).parameters["num_generations"].default == 8

    @dataclasses.dataclass
    class Mine(GRPOConfig):
        depth: int = 3

    mine = Mine(**config_kwargs(tmp_path), depth=4)
    assert (mine.depth, mine.num_generations) == (4, 4)
    options = ["--output_dir", str(tmp_path), "--depth", "5", "--learning_rate", "1e-4", "--bf16", "False"]
    (parsed,) = transformers.HfArgumentParser(Mine).parse_args_into_dataclasses(options)
    assert (parsed.depth, parsed.learning_rate, parsed.bf16) == (5, 1e-4, False)


def test_trained_weights_in_half_precision_are_said(tmp_path, caplog):
    adapter = {"peft_config": LoraConfig(r=4, task_type="CAUSAL_LM")}
    for half, extra in ((False, {}), (True, adapter), (True, {})):
        caplog.clear()
        model = tiny_model().to(torch.bfloat16) if half else tiny_model()
        make(tmp_path, model, **extra, bf16=None)
        said = [
            record.message for record in caplog.records if "Load the model with dtype=torch.float32" in record.message
        ]
        assert len(said) == (half and not extra), "PEFT's adapters are float32"
    assert "27 of 27 trained tensors are bfloat16" in said[0]


def normalised() -> Any:
    model = tiny_model()
    model.model.extra = nn.BatchNorm1d(4)
    return model


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": tiny_model("llama", attention_dropout=0.1)}, r"attention_dropout=0.1.*disable_dropout=True"),
        ({"model": tiny_model("gpt2", resid_pdrop=0.1)}, r"p=0.1"),
        ({"peft_config": LoraConfig(r=4, lora_dropout=0.05, task_type="CAUSAL_LM")}, r"lora_dropout.*p=0.05"),
        ({"model": normalised()}, r"model.extra \(BatchNorm1d\)"),
    ],
    ids=["attention", "layers", "lora", "batch norm"],
)
def test_what_depends_on_the_split_is_refused(tmp_path, parts, words):
    with pytest.raises(SplitDependentError, match=words):
        make(tmp_path, **parts)


def test_split_dependence_can_be_allowed_and_is_said(tmp_path, caplog):
    trainer = make(tmp_path, model=tiny_model("gpt2", resid_pdrop=0.1), allow_split_dependent=True)
    trainer.train()
    assert "does not cover this run: dropout is on" in caplog.text


def test_every_refusal_is_a_value_error():
    # code that catches TRL's errors catches ours
    assert issubclass(GrpoExtError, ValueError)


@pytest.mark.parametrize(
    ("setting", "words"),
    [({"num_steps": 2}, "accelerator_config sets num_steps"), ({"sync_each_batch": True}, "sync_each_batch=True")],
)
def test_accumulation_in_accelerates_settings_is_refused(tmp_path, setting, words):
    with pytest.raises(ConfigError, match=words):
        make(tmp_path, accelerator_config={"gradient_accumulation_kwargs": setting})


def test_tensor_parallelism_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "get_tp_size", lambda self: 2)
    with pytest.raises(ConfigError, match="tensor parallel size 2"):
        make(tmp_path)
