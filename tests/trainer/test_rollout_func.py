"""A user's `rollout_func` goes through this trainer's own step: its completions are the rollout batch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.errors import ConfigError, RolloutError
from tests.support.tiny import config_kwargs, given_rollout, letter_reward, prompts, tiny_model, tiny_tokenizer
from tests.support.trainers import error, parameters
from tests.tolerances import DIFFERENT, UPDATE


def make(folder: Any, rollout: Any = given_rollout, reward: Any = letter_reward, **settings: Any) -> GRPOTrainer:
    args = GRPOConfig(**config_kwargs(folder, **{"adam_epsilon": 1e-2, **settings}))
    tokenizer = tiny_tokenizer()
    return GRPOTrainer(
        tiny_model(), reward, args, prompts(22), prompts(5), processing_class=tokenizer, rollout_func=rollout
    )


def update(folder: Any, rollout: Any = given_rollout, **settings: Any) -> torch.Tensor:
    trainer = make(folder, rollout, **settings)
    before = parameters(trainer)
    trainer.train()
    return parameters(trainer) - before


def test_the_update_is_the_same_for_every_micro_batch_size_and_sampling_says_it_is_the_users(tmp_path, caplog):
    settings = {"rollout_batch_size": 32, "max_steps": 3}
    with caplog.at_level(logging.WARNING):
        whole = update(tmp_path, per_device_train_batch_size=16, **settings)
    assert "rollout_func may sample in its own way; only the update is covered" in caplog.text
    assert "random numbers of Python, NumPy and torch" in caplog.text
    for size in (5, 1):
        assert error(whole, update(tmp_path, per_device_train_batch_size=size, **settings)) <= UPDATE
    assert error(whole, update(tmp_path, per_device_train_batch_size=16, **settings, seed=4)) > DIFFERENT


def test_completions_prompts_masks_and_fields_are_those_of_the_function(tmp_path):
    turns: list[int] = []

    def reward(prompts: Any, completions: Any, turns_seen: Any = turns, **fields: Any) -> list[float]:
        turns_seen.extend(fields["turns"])
        return letter_reward(prompts, completions)

    trainer = make(tmp_path, reward=reward, max_steps=1, shuffle_dataset=False)
    trainer.train()
    rollout, given = (
        trainer._rollouts.batch,
        given_rollout([p for p in prompts(22)["prompt"][:4] for _ in range(4)], trainer),
    )
    assert turns == [2] * 16
    for name, field in (
        ("prompt_ids", "prompt_ids"),
        ("completion_ids", "completion_ids"),
        ("env_mask", "tool_mask"),
        ("logprobs", "sampling_per_token_logps"),
    ):
        assert [row.tolist() for row in rollout.columns[field]] == given[name], name
    assert len({tuple(row) for row in given["prompt_ids"]}) > 4  # prompts that differ within a group


def test_tokens_of_the_environment_carry_no_loss(tmp_path):
    def unmasked(prompts: Any, trainer: Any) -> Any:
        return {**given_rollout(prompts, trainer), "env_mask": None}

    assert error(update(tmp_path), update(tmp_path, unmasked)) > DIFFERENT


def test_without_log_probabilities_it_trains(tmp_path):
    def without(prompts: Any, trainer: Any) -> Any:
        return {**given_rollout(prompts, trainer), "logprobs": None}

    assert torch.equal(update(tmp_path), update(tmp_path, without))  # nothing corrects by them here


def test_too_few_rows_are_an_error_before_anything_is_trained(tmp_path):
    def short(prompts: Any, trainer: Any) -> Any:
        return {name: values[:-1] for name, values in given_rollout(prompts, trainer).items()}

    trainer = make(tmp_path, short)
    before = parameters(trainer)
    with pytest.raises(RolloutError, match="15 prompt_ids for 16 prompts"):
        trainer.train()
    assert torch.equal(before, parameters(trainer))


def test_a_resumed_run_goes_on_with_the_completions_of_its_checkpoint(tmp_path):
    settings = {"rollout_batch_size": 32, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    calls: list[int] = []

    def counted(prompts: Any, trainer: Any) -> Any:
        calls.append(len(prompts))
        return given_rollout(prompts, trainer)

    whole = make(tmp_path / "whole", **settings)
    whole.train()
    resumed = make(tmp_path / "whole", counted, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert torch.equal(parameters(whole), parameters(resumed))
    assert calls == [32]  # the second rollout batch alone


def test_it_is_evaluated_and_replaces_groups_without_variance(tmp_path):
    trainer = make(tmp_path, dynamic_sampling=True, num_generations_eval=4)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(0.0, abs=1.0)


def test_bitwise_mode_refuses_it(tmp_path):
    with pytest.raises(ConfigError, match="rollout_func"):
        make(tmp_path, bitwise_invariant=True)


def test_it_may_sample_with_the_trainer_itself(tmp_path):
    def by_itself(prompts: Any, trainer: Any) -> Any:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [trainer._generate_single_turn([row], None, {}, 1)[0][0] for row in ids]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    trainer = make(tmp_path, by_itself)
    trainer.train()
    assert trainer.state.global_step == 2
