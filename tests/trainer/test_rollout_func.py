"""A user's `rollout_func` goes through this trainer's own step: its completions are the rollout batch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from tests.support import trainers
from tests.support.tiny import given_rollout, prompts
from tests.support.trainers import parameters


def make(folder: Any, rollout: Any = given_rollout, **settings: Any) -> GRPOTrainer:
    sets = {"train_dataset": prompts(22), "eval_dataset": prompts(5)}
    return trainers.make(folder, rollout_func=rollout, **{**sets, "max_steps": 2, **settings})


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


def test_it_may_sample_with_the_trainer_itself_and_it_is_said_that_sampling_is_the_users(tmp_path, caplog):
    def by_itself(prompts: Any, trainer: Any) -> Any:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [trainer._generate_single_turn([row], None, {}, 1)[0][0] for row in ids]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    trainer = make(tmp_path, by_itself)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 2
    assert "rollout_func may sample in its own way; only the update is covered" in caplog.text
    assert "random numbers of Python, NumPy and torch" in caplog.text
