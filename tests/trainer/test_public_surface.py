"""What 0.1.0 offers stays: imports, settings, commands with their options, errors, log keys."""

from __future__ import annotations

import dataclasses

import pytest
import trl
import typer

import grpo_ext
from grpo_ext import GRPOConfig, GRPOTrainer, errors
from grpo_ext.tools.cli import app
from tests.support.tiny import config_kwargs, letter_reward, prompts, sparse_reward, tiny_model, tiny_tokenizer

IMPORTS = """
Console GRPOConfig GRPOTrainer __version__ register_advantage_estimator
"""
SETTINGS = """
advantage_estimator allow_changed_on_resume allow_split_dependent bitwise_invariant bitwise_threads
canonical_unit_size compact_rollouts dynamic_sampling dynamic_sampling_max_rounds
global_batch_size loss_aggregation micro_batch_tokens reward_on_failure reward_retries
reward_timeout rollout_batch_size rollout_chunk_size skip_zero_contribution tool_timeout
"""
ERRORS = """
CheckpointError ConfigError ContractError DataError GrpoExtError MemoryShortageError ModelError PrecisionError
ProcessError RewardError RolloutError SplitDependentError
"""
# beside these, `plan` and `check` take every option of recipes/grpo.py
COMMANDS = {
    "plan": """
--config --engine --mean-completion-length --num-prompts --processes --prompt-length
""",
    "check": """
--against --bitwise --config --json --micro-batch-sizes --processes --steps --tolerance
""",
    "export": """
--base --check --dtype --max-shard-size --merge-adapter --trust-shards
""",
    "report": """
--output
""",
}
LOG_KEYS = """
aux_loss cispo_clip_ratio clip_ratio/high_max clip_ratio/high_mean clip_ratio/low_mean clip_ratio/low_min
clip_ratio/region_mean completions/clipped_ratio completions/max_length completions/max_terminated_length
completions/mean_length completions/mean_terminated_length completions/min_length
completions/min_terminated_length dynamic_sampling/groups_without_variance dynamic_sampling/replaced_groups
dynamic_sampling/rounds dynamic_sampling/sampled_groups entropy entropy_coef epoch eval_cispo_clip_ratio
eval_clip_ratio/high_max eval_clip_ratio/high_mean eval_clip_ratio/low_mean eval_clip_ratio/low_min
eval_clip_ratio/region_mean eval_completions/clipped_ratio eval_completions/max_length
eval_completions/max_terminated_length eval_completions/mean_length eval_completions/mean_terminated_length
eval_completions/min_length eval_completions/min_terminated_length eval_entropy eval_frac_reward_zero_std eval_kl
eval_loss eval_num_tokens eval_policy_loss eval_reward eval_reward_std eval_rewards/letter_reward/mean
eval_rewards/letter_reward/std eval_rewards/sparse_reward/mean eval_rewards/sparse_reward/std eval_runtime
eval_samples_per_second eval_steps_per_second eval_vespo/phi_seq_mean frac_reward_zero_std grad_norm kl
layout/duplicate_share layout/padding_share layout/useful_tokens_per_second learning_rate loss num_tokens
policy_loss reward reward_std rewards/letter_reward/mean rewards/letter_reward/std rewards/sparse_reward/mean
rewards/sparse_reward/std step step_time time/logps time/optimizer time/rollout time/train total_flos train_loss
train_runtime train_samples_per_second train_steps_per_second vespo/phi_seq_mean
"""
RUNS = (
    {"beta": 0.1, "num_iterations": 2, "rollout_batch_size": 32, "max_steps": 4},
    {"dynamic_sampling": True, "entropy_coef": 0.1},
    {"loss_type": "vespo"},
    {"loss_type": "cispo"},
)


def test_imports_are_there():
    assert set(IMPORTS.split()) <= set(grpo_ext.__all__)
    for name in IMPORTS.split():
        assert getattr(grpo_ext, name) is not None
    assert set(ERRORS.split()) <= set(dir(errors))


@pytest.mark.parametrize(
    "path",
    [
        "tools.console.quiet_libraries",
        "tools.report.report",
        "tools.report.ReportCallback",
        "tools.export.export",
        "tools.check.check",
    ],
)
def test_documented_functions_are_there(path):
    module, name = path.rsplit(".", 1)
    assert callable(getattr(__import__(f"grpo_ext.{module}", fromlist=[name]), name))


def test_settings_are_there():
    fields = {spec.name for spec in dataclasses.fields(GRPOConfig)}
    assert set(SETTINGS.split()) <= fields
    assert {spec.name for spec in dataclasses.fields(trl.GRPOConfig)} <= fields


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_their_options(command):
    commands = typer.main.get_command(app).commands
    taken = {option for parameter in commands[command].params for option in parameter.opts}
    assert set(COMMANDS[command].split()) <= taken


def test_log_keys_are_there(tmp_path):
    found = set()
    evaluated = {"eval_strategy": "steps", "eval_steps": 1}
    for model, settings in [("moe", {}), *(("qwen2", evaluated | run) for run in RUNS)]:
        args = GRPOConfig(**config_kwargs(tmp_path, **settings))
        rewards = [letter_reward, sparse_reward]
        trainer = GRPOTrainer(
            tiny_model(model), rewards, args, prompts(22), prompts(5), processing_class=tiny_tokenizer()
        )
        trainer.train()
        found |= {name for line in trainer.state.log_history for name in line}
    assert set(LOG_KEYS.split()) <= found
