"""A run of ours in stock TRL's settings: every setting is said, dropped for a reason, or refused."""

import dataclasses

import pytest
import trl

from grpo_ext import GRPOConfig
from grpo_ext.errors import GrpoExtError
from grpo_ext.settings import named
from grpo_ext.tools.stock import stock_config

ALGORITHM = {*named("unlike_trl")}
CONFIG = {"global_batch_size": 16, "rollout_batch_size": 32, "per_device_train_batch_size": 4, "seed": 1}


# settings that do not change what is learned
LAYOUT = {
    "trail",
    *("global_batch_size", "rollout_batch_size", "rollout_chunk_size", "micro_batch_tokens", "forward"),
    *("skip_zero_contribution", "float32_weight_gradients", "bitwise_invariant"),
    *("canonical_unit_size", "bitwise_threads", "allow_changed_on_resume", "allow_split_dependent", "tool_timeout"),
    *("reward_workers", "reward_timeout", "reward_retries", "reward_on_failure", "eval_pass_threshold"),
    *("eval_pass_reward", "vllm_check", "vllm_lora", "vllm_seeds", "sequence_parallel_size"),
    *("dynamic_sampling_max_rounds", "teacher_model_init_kwargs"),  # without effect alone
}


def test_every_field_of_ours_is_classified():
    defaults = {spec.name: spec.default for spec in dataclasses.fields(GRPOConfig)}
    assert defaults.keys() - {spec.name for spec in dataclasses.fields(trl.GRPOConfig)} - ALGORITHM <= LAYOUT
    assert not any(defaults[name] for name in ALGORITHM)


def test_sizes_are_said_in_trl_s_fields_and_layout_is_dropped():
    by_trl = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    layout = dict.fromkeys(LAYOUT - {*CONFIG, "rollout_chunk_size"}, 1)
    assert stock_config({**CONFIG, **layout, "dynamic_sampling": False}, processes=2) == {**by_trl, "seed": 1}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"per_device_train_batch_size": 5}, r"of 5 on 1 process do not divide global_batch_size=16"),
        ({"dynamic_sampling": True}, "dynamic_sampling=True: stock TRL has no such setting"),
        ({"advantage_estimator": "leave_one_out"}, "advantage_estimator='leave_one_out'"),
        ({"loss_aggregation": "prompt_mean"}, "loss_aggregation='prompt_mean'"),
    ],
)
def test_settings_that_stock_trl_lacks_are_refused(settings, says):
    with pytest.raises(GrpoExtError, match=says):
        stock_config({**CONFIG, **settings}, processes=1)
