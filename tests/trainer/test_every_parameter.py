"""Every parameter of `trl.GRPOConfig` and `trl.GRPOTrainer` is known, and settings of the loop act as in stock TRL."""

import dataclasses
import inspect

import torch
import trl
from transformers import TrainingArguments

from grpo_ext import GRPOTrainer
from tests.support.kept import of_stock
from tests.support.tiny import letter_reward, prompts, sparse_reward, stock_scores, tiny_model
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

# what TRL adds to transformers' settings, beside those of SMOKE: shown by the matrix, by parity cases and by tests of
# their own, refused, or passed on to TRL, where nothing of ours stands in between
KNOWN = """
beta cache_implementation cast_lm_head_to_fp32 chat_template_kwargs delta disable_dropout ds3_gather_for_generation
entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high
generation_batch_size importance_sampling_level log_completions_hub_repo log_multimodal loss_type
mask_truncated_completions max_completion_length max_tool_calling_iterations min_p model_init_kwargs
multi_objective_aggregation num_generations num_iterations off_policy_mask_threshold pad_to_multiple_of
repetition_penalty reward_weights router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos scale_rewards
steps_per_generation temperature top_entropy_quantile top_k top_p transformers_continuous_batching_config
trust_remote_code use_adaptive_entropy use_transformers_continuous_batching use_transformers_paged use_vllm
vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization
vllm_group_port vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
vllm_tensor_parallel_size
"""


def test_every_parameter_of_trls_configuration_is_known():
    """A new one fails here: show what it does, or refuse it, and name it above."""
    trls, transformers_own = (
        {spec.name for spec in dataclasses.fields(config)} for config in (trl.GRPOConfig, TrainingArguments)
    )
    assert trls - transformers_own - {*KNOWN.split(), *SMOKE} == set()


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
    theirs = of_stock(lambda: logged_keys(trl.GRPOTrainer, tmp_path / "theirs"))
    assert theirs - ours == set()
    assert {"reward", "kl", "eval_reward", "grad_norm"} <= theirs


def test_an_optimizer_and_a_schedule_of_the_users_are_used(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = make(tmp_path, model, optimizers=(optimizer, schedule), max_steps=2)
    trainer.train()
    assert [line["learning_rate"] for line in trainer.state.log_history if "loss" in line] == [0.25, 0.125]
