"""Bad input ends before training with one error that names the values, the rule and the remedy."""

import copy
import dataclasses
import inspect
import os
import pickle
import re
from collections.abc import Callable
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from datasets import Dataset
from peft import PrefixTuningConfig

from grpo_ext import GRPOConfig
from grpo_ext.errors import ConfigError, GrpoExtError, ModelError
from grpo_ext.runtime import determinism
from tests.support.drop_in import conversations, tool_tokenizer
from tests.support.tiny import config_kwargs, given_rollout, prompts, tiny_model, tiny_scorer, tiny_tokenizer
from tests.support.tool_runs import Game
from tests.support.trainers import make, passing_on

BITWISE = {"bitwise_invariant": True}
TRUST = {"trust_region": "tv", "trust_region_threshold": 0.15}
SETTINGS = [
    ({"global_batch_size": 15}, ["global_batch_size=15", "num_generations=4", "to 12 or 16", "to 60"]),
    ({"global_batch_size": 18, "rollout_batch_size": 54}, ["rollout_batch_size=54", "whole groups", "use 36 or 72"]),
    ({"per_device_eval_batch_size": -1}, ["per_device_eval_batch_size=-1", "1 or more"]),
    ({"gradient_accumulation_steps": 7}, ["gradient_accumulation_steps=7", "derived as 4", "remove"]),
    ({"global_batch_size": None, "per_device_train_batch_size": 5}, ["= 5 completions", "set global_batch_size to"]),
    ({"optim": "adalomo"}, ["optim=adalomo", "use another optimizer"]),
    ({"loss_type": "dr_grpo", "max_completion_length": None}, ["loss_type='dr_grpo'", "which is None", "set it to"]),
    ({"loss_type": "grpoo"}, ["loss_type='grpoo'", "dapo"]),
    ({"reward_on_failure": "shrug"}, ["reward_on_failure='shrug'", "'error', 'none'"]),
    ({"reward_timeout": 0}, ["reward_timeout=0", "more than 0"]),
    ({"top_entropy_quantile": 2.0}, ["top_entropy_quantile=2.0", "from 0 to 1"]),
    ({"tool_timeout": float("inf")}, ["tool_timeout=inf", "None for no limit"]),  # a thread cannot wait for so long
    ({"bf16": "no"}, ["bf16='no' is text, and takes bool: no quotes"]),
    ({"epsilon_high": "0.3"}, ["epsilon_high='0.3' is text, and takes float"]),
    ({"routing_replay": "no"}, ["routing_replay='no' is text, and takes bool"]),
    ({"top_k": -1}, ["top_k=-1: use a whole number, 0 or more"]),  # vLLM takes it
    ({"top_k": -2, "use_vllm": True}, ["top_k=-2: use a whole number, -1 or more"]),
    ({"reward_weights": [float("nan")]}, ["reward_weights=[nan]", "finite"]),
    ({"scale_rewards": "grp"}, ["scale_rewards='grp': use one of 'group', 'batch', 'none', True, False"]),
    ({"multi_objective_aggregation": "sum"}, ["multi_objective_aggregation='sum': use one of 'sum_then_normalize'"]),
    ({"vllm_mode": "remote"}, ["vllm_mode='remote': use one of 'server', 'colocate'"]),
    ({"log_level": "loud"}, ["log_level='loud': use one of 'detail', 'debug'"]),
    ({"delta": -1.0}, ["delta=-1.0: use a number above 0"]),
    ({"epsilon_high": -0.1}, ["epsilon_high=-0.1: use 0 or more"]),
    ({"sapo_temperature_pos": 0.0}, ["sapo_temperature_pos=0.0: use a number above 0"]),
    ({"vespo_k_neg": -1.0}, ["vespo_k_neg=-1.0: use 0 or more"]),
    ({"vllm_importance_sampling_clip_min": -0.5}, ["vllm_importance_sampling_clip_min=-0.5: use 0 or more"]),
    ({"min_p": 1.5}, ["min_p=1.5: use a number from 0 to 1"]),
    ({"ref_model_mixup_alpha": 2.0}, ["ref_model_mixup_alpha=2.0: use a number from 0 to 1"]),
    ({"ref_model_sync_steps": 0}, ["ref_model_sync_steps=0 must be a whole number, 1 or more"]),
    ({"max_completion_length": 0}, ["max_completion_length=0 must be a whole number, 1 or more"]),
    ({"advantage_estimator": "rloo"}, ["'rloo' is unknown; use one of group_centered"]),
    (
        {"advantage_estimator": "leave_one_out", "scale_rewards": "batch"},
        ["both determine how rewards become advantages"],
    ),
    ({"advantage_estimator": "pass_at_k"}, ["advantage_k=None", "from 1 to 3", "num_generations - 1"]),
    ({"advantage_estimator": "pass_at_k", "advantage_k": 4}, ["advantage_k=4", "from 1 to 3"]),
    ({"advantage_estimator": "max_rl", "advantage_k": 2}, ["advantage_k=2", "'max_rl'", "takes none"]),
    ({"trust_region": "tv"}, ["trust_region_threshold=None: set both or neither", "0.15"]),
    ({"trust_region_threshold": 0.1}, ["trust_region=None", "set both or neither"]),
    ({**TRUST, "trust_region_threshold": 15}, ["trust_region_threshold=15: use a number above 0, below 1"]),
    ({**TRUST, "loss_type": "cispo"}, ["loss_type='cispo'", "use one of grpo, bnpo"]),
    ({**TRUST, "importance_sampling_level": "sequence"}, ["importance_sampling_level='sequence'", "'token'"]),
    ({**TRUST, "delta": 2.0}, ["delta=2.0", "no delta"]),
    ({"trust_region": "js", "trust_region_threshold": 0.1}, ["trust_region='js' is unknown", "'tv', 'kl'"]),
    ({"sequence_mask_low": -0.01}, ["sequence_mask_low=-0.01: use a ratio of 0 or more, below 1"]),
    ({"sequence_mask_high": 0.01}, ["sequence_mask_high=0.01: use a ratio above 1"]),
    (
        {"dynamic_sampling": True, "use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
        ["as tensor-parallel vLLM engines"],
    ),
    ({**BITWISE, "micro_batch_tokens": 100}, ["canonical_unit_size sets their size"]),
    ({**BITWISE, "use_vllm": True, "vllm_mode": "colocate"}, ["use_vllm without VLLM_BATCH_INVARIANT=1"]),
    ({**BITWISE, "use_vllm": True, "vllm_mode": "server", "vllm_seeds": False}, ["vllm_seeds=False"]),
    ({**BITWISE, "torch_compile": True}, ["torch_compile"]),
    ({**BITWISE, "deepspeed": {"zero_optimization": {"stage": 2}}}, ["DeepSpeed"]),
    ({**BITWISE, "canonical_unit_size": 9}, ["use 1 to 4 (num_generations)"]),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=["+".join(s) for s, _ in SETTINGS])
def test_settings_that_break_a_rule_are_refused(tmp_path, settings, words):
    with pytest.raises(ConfigError) as error:
        GRPOConfig(**config_kwargs(tmp_path, **settings))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BITWISE, "bitwise_invariant=True .*{}"),
        ({"rollout_lag": 1}, "with FSDP or DeepSpeed: .* Use rollout_lag=0, or DDP"),
        ({"rollout_lag": 1, "use_vllm": True, "vllm_mode": "server"}, "with FSDP or DeepSpeed: .* Use rollout_lag=0"),
    ],
)
def test_engines_of_the_launcher_that_shard_are_refused(tmp_path, monkeypatch, settings, words, engine):
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(ConfigError, match=f"(?i){words.format(engine)}"):
        GRPOConfig(**config_kwargs(tmp_path, **settings))


def rows(*prompts: str) -> Dataset:
    return Dataset.from_dict({"prompt": [*prompts]})


def dropping() -> Any:
    return tiny_model("llama", attention_dropout=0.1)


def accumulating(**settings: Any) -> dict[str, Any]:
    return {"accelerator_config": {"gradient_accumulation_kwargs": settings}}


# what is refused, by the error and its words
REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "DataError: row 1 of the training data set has an empty prompt": lambda: {"train_dataset": rows("a", "", "b")},
    "DataError: .*evaluation 'b' data set": lambda: {"eval_dataset": {"a": prompts(3), "b": rows()}},
    r"ModelError: .*is a Qwen2Model .*AutoModelForCausalLM": lambda: {
        "model": transformers.AutoModel.from_config(tiny_model().config)
    },
    r"ModelError: .*'default' \(P.*\) puts virtual tokens before the prompt.*for example LoRA": lambda: {
        "peft_config": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    },
    "ConfigError: .*pass the tokenizer as processing_class": lambda: {"processing_class": None},
    "SplitDependentError: .*attention_dropout=0.1.*disable_dropout=True": lambda: {"model": dropping()},
    "SplitDependentError: .*dropout": lambda: {"model": dropping(), **BITWISE},
    "SplitDependentError: .*CpmAnt puts a prompt before the padding": lambda: {
        "model": tiny_model("cpmant", dim_head=8, dim_ff=48, dropout_p=0.0)
    },
    r"ConfigError: .*Own\._prepare_inputs .*override _generate_and_score_completions": lambda: {
        "cls": passing_on("_prepare_inputs")
    },
    "ConfigError: .*needs an accelerator": lambda: {"fp16": True},
    "ConfigError: .*accelerator_config sets num_steps": lambda: accumulating(num_steps=2),
    "ConfigError: .*sync_each_batch=True": lambda: accumulating(sync_each_batch=True),
    "ConfigError: .*reward models": lambda: {
        **{"reward": tiny_scorer(), "reward_processing_classes": tiny_tokenizer()},
        **BITWISE,
    },
    "ConfigError: .*rollout_func": lambda: {"rollout_func": given_rollout, **BITWISE},
    "ConfigError: .*eval_pass_reward='letters' is the name of 0 reward.* did you mean 'letter_reward'": lambda: {
        "eval_pass_reward": "letters"
    },
    "ConfigError: .*reward_workers=2 with environment_factory": lambda: {
        **{"reward": None, "environment_factory": Game, "reward_workers": 2},
        **{"processing_class": tool_tokenizer(), "train_dataset": conversations()},
    },
    "ConfigError: .*this one is a stream": lambda: {
        **{"dynamic_sampling": True, "train_dataset": prompts(8).to_iterable_dataset()}
    },
    "ConfigError: .*which has 4 and a rollout batch takes 4; use more prompts": lambda: {
        **{"dynamic_sampling": True, "train_dataset": prompts(4)}
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_parts_that_break_a_rule_are_refused(tmp_path, words):
    with pytest.raises(GrpoExtError) as error:
        make(tmp_path, **REFUSED[words]())
    assert re.match(words, f"{error.type.__name__}: {error.value}", re.DOTALL)


@pytest.mark.parametrize("kind", ["fused", "hooks"])
def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(tmp_path, kind):
    """In the two ways in which such optimizers do it. Others are taken (test_drop_in)."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "fused":
        optimizer.fused_backward = lambda loss, lr: None
    else:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.data.sub_(0.1 * p.grad))
    with pytest.raises(ConfigError, match="during the backward pass"):
        make(tmp_path, model=model, optimizers=(optimizer, None))


def test_bitwise_mode_refuses_kernels_of_another_library(tmp_path, monkeypatch):
    monkeypatch.setattr(determinism, "current_flash_attention_impl", lambda: "FA4")
    with pytest.raises(ConfigError, match="bitwise_invariant=True cannot be combined with the attention kernels 'FA4'"):
        make(tmp_path, **BITWISE)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/nope", "model 'runs/nope' cannot be loaded; check the path or the name"),
        ("/runs/nope", "there is no folder '/runs/nope' with a model; check the path"),
        ("./nope", r"there is no folder './nope' with a model"),
        ("a/path/with parts", "there is no folder 'a/path/with parts' with a model"),
    ],
)
def test_a_model_that_is_neither_a_folder_nor_on_the_hub_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=message):
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


SEVERAL_MACHINES = "--num_machines 2 --num_processes 2 --main_process_ip 10.0.0.1 --main_process_port 1"


@pytest.mark.parametrize(
    ("options", "alone"), [("--num_processes 2", True), (SEVERAL_MACHINES, True), ("--num_processes 1", False)]
)
def test_a_launcher_that_starts_one_process_of_several_is_named(tmp_path, monkeypatch, caplog, options, alone):
    """With the environment that `accelerate launch` makes on a machine without a second accelerator."""
    parsed = launch_command_parser().parse_args([*options.split(), "--machine_rank", "0", "train.py"])
    _, environment = prepare_simple_launcher_cmd_env(_validate_launch_command(parsed)[0])
    for name, value in environment.items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    make(tmp_path / "out", max_steps=1).train()
    assert ("This process trains alone" in caplog.text) is alone


def test_split_dependence_can_be_allowed_and_is_said(tmp_path, caplog):
    make(tmp_path, model=dropping(), allow_split_dependent=True).train()
    assert "does not cover this run: dropout is on" in caplog.text
