"""Every parameter of `trl.GRPOConfig` and `trl.GRPOTrainer`, and where it is shown to do what it does in TRL.

A parameter that a new TRL or transformers brings is in no row below and fails by name; each row's claim is checked.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import transformers
import trl

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.cases import CASES, SETTINGS
from tests.support.tiny import (
    config_kwargs,
    letter_reward,
    prompts,
    sparse_reward,
    stock_scores,
    tiny_model,
    tiny_tokenizer,
)

ROOT = Path(__file__).parents[2]

# set in a run below, which logs what stock TRL logs with the same settings
SMOKE = {
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "average_tokens_across_devices": False,
    "chat_template_kwargs": {},
    "data_seed": 7,
    "dataloader_in_order": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "disable_dropout": True,
    "disable_tqdm": True,
    "do_eval": True,
    "do_train": True,
    "eval_accumulation_steps": 1,
    "eval_delay": 1,
    "eval_do_concat_batches": False,
    "eval_on_start": True,
    "eval_steps": 1,
    "eval_strategy": "steps",
    "eval_use_gather_object": True,
    "generation_kwargs": {"no_repeat_ngram_size": 3},
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "greater_is_better": True,
    "include_num_input_tokens_seen": "no",
    "learning_rate": 1e-3,
    "log_completions": True,
    "log_level": "error",
    "log_level_replica": "error",
    "log_multimodal": False,
    "log_on_each_node": False,
    "log_unique_prompts": True,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,
    "logging_steps": 1,
    "logging_strategy": "steps",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "lr_scheduler_type": "cosine_with_min_lr",
    "max_grad_norm": 0.5,
    "metric_for_best_model": "eval_reward",
    "load_best_model_at_end": True,
    "num_completions_to_print": 1,
    "num_generations_eval": 2,
    "optim_args": "",
    "per_device_eval_batch_size": 2,
    "prediction_loss_only": False,
    "project": "some",
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 1,
    "report_to": "none",
    "restore_callback_states_from_checkpoint": False,
    "run_name": "some run",
    "save_on_each_node": False,
    "save_only_model": True,
    "save_steps": 1,
    "save_strategy": "steps",
    "save_total_limit": 1,
    "shuffle_dataset": False,
    "skip_memory_metrics": True,
    "sync_ref_model": True,
    "torch_empty_cache_steps": 1,
    "trust_remote_code": False,
    "use_bias_correction_kl": True,
    "warmup_steps": 1,
    "weight_decay": 0.01,
}

# a case of the invariance matrix sets it
MATRIX = """
adam_epsilon beta delta entropy_coef entropy_coef_delta entropy_target epsilon_high gradient_checkpointing
importance_sampling_level learning_rate loss_type mask_truncated_completions max_completion_length max_steps min_p
multi_objective_aggregation num_generations num_generations_eval num_iterations num_train_epochs
off_policy_mask_threshold per_device_eval_batch_size per_device_train_batch_size repetition_penalty reward_weights
scale_rewards seed temperature top_entropy_quantile top_k top_p use_adaptive_entropy
"""

# a test of its own: the file that has it
TESTED = {
    "tests/trainer/test_drop_in.py": "bf16 cast_lm_head_to_fp32 dataloader_persistent_workers "
    "dataloader_prefetch_factor gradient_accumulation_steps output_dir pad_to_multiple_of steps_per_generation",
    "tests/trainer/test_tools.py": "max_tool_calling_iterations",
    "tests/trainer/test_parity.py": "epsilon router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos "
    "vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos",
    "tests/unit/batching/test_sizes.py": "generation_batch_size",
    "tests/unit/algorithms/test_losses.py": "vllm_importance_sampling_correction",
    "tests/unit/test_checks.py": "neftune_noise_alpha",
    "tests/unit/rollouts/test_decoding.py": "cache_implementation",
    "tests/trainer/test_fp16.py": "fp16",
    "tests/trainer/test_out_of_memory.py": "auto_find_batch_size",
    "tests/trainer/test_trackers.py": "report_to",
    "tests/trainer/test_checkpoints.py": "push_to_hub resume_from_checkpoint",
    "tests/trainer/test_bad_input.py": "accelerator_config optim",
    "tests/recipes/test_configs.py": "dataloader_drop_last",
    "tests/distributed/test_engines.py": "deepspeed",
    "tests/vllm/train.py": "use_vllm vllm_mode vllm_gpu_memory_utilization vllm_max_model_length",
}

# nothing of ours stands between the parameter and the code of TRL, transformers or Accelerate that reads it
PASSED_ON = {
    "what TRL's constructor does with the model": "model_init_kwargs",
    "TRL's table of completions": "log_completions_hub_repo",
    "TRL's vLLM client and engine": "vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex "
    "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port "
    "vllm_importance_sampling_cap",
    "transformers' continuous batching": "transformers_continuous_batching_config use_transformers_paged",
    "the Hub": "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token trackio_bucket_id "
    "trackio_space_id trackio_static_space_id",
    "how processes are joined": "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph "
    "ddp_timeout fsdp_config local_rank parallelism_config",
    "how parameters are gathered": "ds3_gather_for_generation",
    "precision and compilation of the forward": "bf16_full_eval fp16_full_eval torch_compile_backend "
    "torch_compile_mode use_cache liger_kernel_config full_determinism activation_checkpointing "
    "activation_checkpointing_kwargs",
    "the loop and what it saves": "debug enable_jit_checkpoint ignore_data_skip optim_target_modules do_predict",
    "for trainers with labels; without meaning in GRPO": "batch_eval_metrics include_for_metrics label_names "
    "label_smoothing_factor length_column_name train_sampling_strategy remove_unused_columns",
    "the loader of TRL's own path alone": "dataloader_multiprocessing_context",
}

# the package itself decides by it (refuses, bounds, hands over); the file that does
DECIDED = {
    "grpo_ext/config.py": "ddp_backend use_cpu",
    "grpo_ext/setting_rules.py": "fsdp tf32 torch_compile use_liger_kernel vllm_tensor_parallel_size "
    "use_transformers_continuous_batching",
    "grpo_ext/trainer.py": "entropy_coef_max entropy_coef_min",
    "grpo_ext/rollouts/build.py": "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
    "vllm_importance_sampling_mode",
}

# parameters of the trainer: the file that shows them
TRAINER = {
    "model": "tests/trainer/test_drop_in.py",
    "reward_funcs": "tests/trainer/test_drop_in.py",
    "args": "tests/trainer/test_drop_in.py",
    "train_dataset": "tests/support/drop_in.py",
    "eval_dataset": "tests/trainer/test_drop_in.py",
    "processing_class": "tests/trainer/test_drop_in.py",
    "reward_processing_classes": "tests/trainer/test_hooks.py",
    "callbacks": "tests/trainer/test_hooks.py",
    "optimizers": "tests/trainer/test_every_parameter.py",
    "quantization_config": "tests/trainer/test_every_parameter.py",
    "peft_config": "tests/trainer/test_drop_in.py",
    "tools": "tests/support/drop_in.py",
    "rollout_func": "tests/trainer/test_hooks.py",
    "environment_factory": "tests/trainer/test_hooks.py",
}


def words(rows: dict[str, str]) -> set[str]:
    return {name for names in rows.values() for name in names.split()}


@cache
def mentioned(path: str) -> set[str]:
    return set(re.findall(r"\w+", (ROOT / path).read_text()))


def test_every_parameter_of_trls_configuration_is_in_a_row():
    known = {*SMOKE, *MATRIX.split()} | words(TESTED) | words(PASSED_ON) | words(DECIDED)
    unknown = {spec.name for spec in dataclasses.fields(trl.GRPOConfig)} - known
    assert unknown == set(), "a new parameter: show what it does here, or say why it needs nothing"


def test_every_parameter_of_trls_trainer_is_in_a_row():
    parameters = set(inspect.signature(trl.GRPOTrainer.__init__).parameters) - {"self"}
    assert parameters == set(TRAINER)
    assert [name for name, path in TRAINER.items() if name not in mentioned(path)] == []


def test_the_matrix_sets_what_the_rows_say():
    used = set(SETTINGS).union(*(case.config for case in CASES.values())) | {"per_device_train_batch_size"}
    assert set(MATRIX.split()) - used == set()


@pytest.mark.parametrize("path", [*TESTED, *DECIDED])
def test_a_file_names_the_parameters_it_is_said_to_test(path):
    assert [name for name in {**TESTED, **DECIDED}[path].split() if name not in mentioned(path)] == []


def test_an_unknown_parameter_would_be_found():
    known = {*SMOKE, *MATRIX.split()} | words(TESTED) | words(PASSED_ON) | words(DECIDED)
    assert "a_parameter_of_next_year" not in known
    assert "a_parameter_of_next_year" not in mentioned("tests/unit/step/test_plan.py")


def logged_keys(trainer_class, config_class, folder, **settings) -> set[str]:
    common = {**config_kwargs(folder), **SMOKE, "beta": 0.1, "reward_weights": [1.0, 0.5], **settings}
    if config_class is trl.GRPOConfig:
        ours = {spec.name for spec in dataclasses.fields(GRPOConfig)} - {
            f.name for f in dataclasses.fields(trl.GRPOConfig)
        }
        common = {name: value for name, value in common.items() if name not in ours}
        common |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "use_cpu": True}
    model = tiny_model()
    folder_of_model = folder / "model"
    model.save_pretrained(folder_of_model)
    trainer = trainer_class(
        model=str(folder_of_model),
        reward_funcs=[letter_reward, sparse_reward],
        args=config_class(**common),
        train_dataset=prompts(8),
        eval_dataset=prompts(4, seed=1),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    return set().union(*trainer.state.log_history)


@stock_scores
def test_settings_of_the_loop_log_what_stock_trl_logs(tmp_path):
    ours = logged_keys(GRPOTrainer, GRPOConfig, tmp_path / "ours")
    theirs = logged_keys(trl.GRPOTrainer, trl.GRPOConfig, tmp_path / "theirs")
    assert theirs - ours == set()
    assert {"reward", "kl", "eval_reward", "grad_norm"} <= theirs


def test_an_optimizer_and_a_schedule_of_the_users_are_used(tmp_path):
    import torch

    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=letter_reward,
        args=GRPOConfig(**config_kwargs(tmp_path)),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    assert [line["learning_rate"] for line in trainer.state.log_history if "loss" in line] == [0.25, 0.125]


def test_a_quantization_config_reaches_the_loader(tmp_path, monkeypatch):
    class Reached(Exception):
        pass

    def load(*args, **kwargs):
        assert kwargs["quantization_config"] == "some"
        raise Reached

    tiny_model().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(transformers.Qwen2ForCausalLM, "from_pretrained", load)
    with pytest.raises(Reached):
        GRPOTrainer(
            model=str(tmp_path / "model"),
            reward_funcs=letter_reward,
            args=GRPOConfig(**config_kwargs(tmp_path)),
            train_dataset=prompts(),
            processing_class=tiny_tokenizer(),
            quantization_config="some",
        )
