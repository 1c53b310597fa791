"""Overrides that TRL's equal shares made safe, and what is refused or copied where shares differ; on one process."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError, RolloutError
from grpo_ext.rollouts import batch, source
from grpo_ext.runtime.collectives import without_gather
from tests.support.tiny import given_rollout, prompts, tiny_tokenizer
from tests.support.trainers import make


class Alone(GRPOTrainer):
    """Makes the whole dictionary by itself."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        ids = torch.arange(5, 9).repeat(len(inputs), 1)
        ones, advantages = torch.ones_like(ids), torch.arange(float(len(inputs))) % 4 - 1.5
        scored = {"prompt_ids": ids, "prompt_mask": ones, "completion_ids": ids, "completion_mask": ones}
        return scored | {"advantages": advantages}


def test_an_override_without_super_is_said_once_and_refused_in_bitwise_mode(tmp_path, caplog):
    make(tmp_path / "plain", cls=Alone, max_steps=2).train()
    assert caplog.text.count("_generate_and_score_completions does not call super(), so it may sample") == 1
    with pytest.raises(ConfigError, match="bitwise_invariant=True needs this trainer's own sampling"):
        make(tmp_path / "bitwise", cls=Alone, bitwise_invariant=True).train()


def test_an_override_without_super_needs_equal_shares(tmp_path, monkeypatch):
    trainer = make(tmp_path, cls=Alone)
    monkeypatch.setattr(source, "gather_lists", lambda items: [*items, 8])
    with pytest.raises(RolloutError, match="the processes have 8 to 16 rows"):
        trainer.train()


def test_a_hook_that_processes_call_differently_often_may_not_gather():
    accelerator: Any = SimpleNamespace(num_processes=2, gather=lambda value: value)
    with without_gather(accelerator, "_generate_single_turn"), pytest.raises(RolloutError, match="_turn gathers, and"):
        accelerator.gather(1)
    assert accelerator.gather(1) == 1
    accelerator.num_processes = 1
    with without_gather(accelerator, "_generate_single_turn"):
        assert accelerator.gather(1) == 1


def test_a_field_of_one_process_alone_is_refused(monkeypatch):
    ids = torch.ones(4, 2, dtype=torch.long)
    scored = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), ids)
    scored["advantages"] = torch.zeros(4)
    other = {**scored, "extra": torch.zeros(4)}
    assert len(batch.gather_scored(scored, 4, 2)) == 4
    assert batch.gather_scored(other, 4, 2).fields.keys() == {"extra"}
    monkeypatch.setattr(batch, "gather_lists", lambda items: [*items, (4, scored)])
    with pytest.raises(RolloutError, match="extra came with some completions"):
        batch.gather_scored(other, 4, 2)


def test_a_rollout_func_may_write_to_its_prompts(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "ab"}]} for _ in range(12)]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    seen: list[int] = []

    def rollout(messages: list[Any], trainer: Any) -> dict[str, Any]:
        for conversation in messages:
            conversation.append({"role": "assistant", "content": "c"})
        return given_rollout(["ab"] * len(messages), trainer)

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        seen.extend(map(len, prompts))
        return [float(i % 4) for i in range(len(completions))]

    parts = {"reward_funcs": reward, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    make(tmp_path, max_steps=1, rollout_func=rollout, **parts).train()
    assert seen == [1] * 16


# ---- A rollout_func --------------------------------------------------------------------------------------------------


def rolling(folder: Any, rollout: Any = given_rollout, **settings: Any) -> GRPOTrainer:
    sets = {"train_dataset": prompts(22), "eval_dataset": prompts(5)}
    return make(folder, rollout_func=rollout, **{**sets, "max_steps": 2, **settings})


def test_bitwise_mode_refuses_a_rollout_func(tmp_path):
    with pytest.raises(ConfigError, match="rollout_func"):
        rolling(tmp_path, bitwise_invariant=True)


def test_a_rollout_func_may_sample_with_the_trainer_itself_and_that_is_said(tmp_path, caplog):
    def by_itself(prompts: Any, trainer: Any) -> Any:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [trainer._generate_single_turn([row], None, {}, 1)[0][0] for row in ids]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    trainer = rolling(tmp_path, by_itself)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 2
    assert "rollout_func may sample in its own way; only the update is covered" in caplog.text
    assert "random numbers of Python, NumPy and torch" in caplog.text
