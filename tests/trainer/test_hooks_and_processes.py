"""Overrides that TRL's equal shares made safe, and what is refused or copied where shares differ; on one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError, RolloutError
from grpo_ext.rollouts import batch, source
from grpo_ext.runtime.collectives import without_gather
from tests.support.tiny import given_rollout, tiny_tokenizer
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


class TwoTurns(GRPOTrainer):
    """Samples every turn twice, and keeps the second."""

    pairs: list[Any]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        first, _ = super()._generate_single_turn(*args, **kwargs)
        second, logps = super()._generate_single_turn(*args, **kwargs)
        self.pairs.append((first, second))
        return second, logps


def test_a_further_call_of_super_samples_something_else(tmp_path):
    TwoTurns.pairs = []
    make(tmp_path, cls=TwoTurns, max_steps=2).train()
    same = [one == other for first, second in TwoTurns.pairs for one, other in zip(first, second)]
    assert len(same) == 32
    assert sum(same) < 4


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
