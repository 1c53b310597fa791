"""Every parameter of `trl.GRPOConfig` and `trl.GRPOTrainer` is known, and settings of the loop act as in stock TRL."""

from __future__ import annotations

import dataclasses
import inspect

import torch
import trl

from grpo_ext import GRPOTrainer
from tests.support.tiny import (
    letter_reward,
    prompts,
    sparse_reward,
    stock_scores,
    tiny_model,
)
from tests.support.trainers import make

# set in a run below, which logs what stock TRL logs with the same settings
SMOKE = {
    "adam_beta1": 0.8,
    "data_seed": 7,
    "eval_accumulation_steps": 1,
    "eval_delay": 1,
    "eval_on_start": True,
    "eval_steps": 1,
    "eval_strategy": "steps",
    "generation_kwargs": {"no_repeat_ngram_size": 3},
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "greater_is_better": True,
    "load_best_model_at_end": True,
    "log_completions": True,
    "log_unique_prompts": True,
    "logging_first_step": True,
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "lr_scheduler_type": "cosine_with_min_lr",
    "metric_for_best_model": "eval_reward",
    "num_completions_to_print": 1,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 2,
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 1,
    "save_only_model": True,
    "save_steps": 1,
    "save_strategy": "steps",
    "save_total_limit": 1,
    "shuffle_dataset": False,
    "sync_ref_model": True,
    "torch_empty_cache_steps": 1,
    "use_bias_correction_kl": True,
    "warmup_steps": 1,
    "weight_decay": 0.01,
}

# beside those of SMOKE: shown by the matrix, by parity cases and by tests of their own, refused, or passed on to TRL,
# transformers and Accelerate, where nothing of ours stands in between
KNOWN = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta2 adam_epsilon
auto_find_batch_size average_tokens_across_devices batch_eval_metrics beta bf16 bf16_full_eval cache_implementation
cast_lm_head_to_fp32 chat_template_kwargs dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend
ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed delta
disable_dropout disable_tqdm do_eval do_predict do_train ds3_gather_for_generation enable_jit_checkpoint entropy_coef
entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high eval_do_concat_batches
eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config full_determinism generation_batch_size
gradient_accumulation_steps gradient_checkpointing hub_always_push hub_model_id hub_private_repo hub_revision
hub_strategy hub_token ignore_data_skip importance_sampling_level include_for_metrics include_num_input_tokens_seen
label_names label_smoothing_factor learning_rate length_column_name liger_kernel_config local_rank
log_completions_hub_repo log_level log_level_replica log_multimodal log_on_each_node logging_nan_inf_filter
logging_steps logging_strategy loss_type mask_truncated_completions max_completion_length max_grad_norm max_steps
max_tool_calling_iterations min_p model_init_kwargs multi_objective_aggregation neftune_noise_alpha num_generations
num_generations_eval num_iterations num_train_epochs off_policy_mask_threshold optim optim_args optim_target_modules
output_dir pad_to_multiple_of parallelism_config per_device_eval_batch_size per_device_train_batch_size
prediction_loss_only project push_to_hub remove_unused_columns repetition_penalty report_to
restore_callback_states_from_checkpoint resume_from_checkpoint reward_weights router_aux_loss_coef run_name
sapo_temperature_neg sapo_temperature_pos save_on_each_node scale_rewards seed skip_memory_metrics
steps_per_generation temperature tf32 top_entropy_quantile top_k top_p torch_compile torch_compile_backend
torch_compile_mode trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy
transformers_continuous_batching_config trust_remote_code use_adaptive_entropy use_cache use_cpu use_liger_kernel
use_transformers_continuous_batching use_transformers_paged use_vllm vespo_k_neg vespo_k_pos vespo_lambda_neg
vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
"""


def test_every_parameter_of_trls_configuration_is_known():
    """A new one fails here: show what it does, or refuse it, and name it above."""
    assert {spec.name for spec in dataclasses.fields(trl.GRPOConfig)} - {*KNOWN.split(), *SMOKE} == set()


def test_every_parameter_of_trls_trainer_is_known():
    given = "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks"
    given += " optimizers quantization_config peft_config tools rollout_func environment_factory"
    assert set(inspect.signature(trl.GRPOTrainer.__init__).parameters) - {"self"} == set(given.split())


def logged_keys(cls, folder) -> set[str]:
    tiny_model().save_pretrained(folder / "model")  # stock TRL loads the reference by its name
    settings = {**SMOKE, "beta": 0.1, "reward_weights": [1.0, 0.5], "gradient_accumulation_steps": 2, "max_steps": 2}
    parts = {"train_dataset": prompts(8), "eval_dataset": prompts(4, seed=1)}
    trainer = make(folder, str(folder / "model"), [letter_reward, sparse_reward], cls, **parts, **settings)
    trainer.train()
    return set().union(*trainer.state.log_history)


@stock_scores
def test_settings_of_the_loop_log_what_stock_trl_logs(tmp_path):
    ours = logged_keys(GRPOTrainer, tmp_path / "ours")
    theirs = logged_keys(trl.GRPOTrainer, tmp_path / "theirs")
    assert theirs - ours == set()
    assert {"reward", "kl", "eval_reward", "grad_norm"} <= theirs


def test_an_optimizer_and_a_schedule_of_the_users_are_used(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = make(tmp_path, model, optimizers=(optimizer, schedule), max_steps=2)
    trainer.train()
    assert [line["learning_rate"] for line in trainer.state.log_history if "loss" in line] == [0.25, 0.125]
