"""What 0.1.0 offers stays: imports, settings, errors."""

from __future__ import annotations

import dataclasses

import trl

import grpo_ext
from grpo_ext import GRPOConfig, errors

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


def test_imports_are_there():
    assert set(IMPORTS.split()) <= set(grpo_ext.__all__)
    for name in IMPORTS.split():
        assert getattr(grpo_ext, name) is not None
    assert set(ERRORS.split()) <= set(dir(errors))


def test_settings_are_there():
    fields = {spec.name for spec in dataclasses.fields(GRPOConfig)}
    assert set(SETTINGS.split()) <= fields
    assert {spec.name for spec in dataclasses.fields(trl.GRPOConfig)} <= fields
