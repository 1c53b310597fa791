"""Reward functions in the trainer: the user's own objects, called by chunks, and what they log."""

from __future__ import annotations

import functools

import pandas

from grpo_ext import GRPOTrainer
from tests.support.tiny import letter_reward
from tests.support.trainers import log_of, make


def plain(prompts, completions, **kwargs):
    """Whether it has an a."""
    return [float("a" in c) for c in completions]


async def later(prompts, completions, **kwargs):
    return plain(prompts, completions)


def test_reward_functions_stay_the_objects_they_are(tmp_path):
    functions = [plain, later, functools.partial(plain, extra=1)]
    trainer = make(tmp_path, reward=functions, max_steps=1)
    trainer.train()
    assert all(mine is given for mine, given in zip(trainer.reward_funcs, functions, strict=True))


def test_columns_logged_in_one_rollout_and_not_in_the_next_are_shown(tmp_path):
    calls = []

    def graded(prompts, completions, log_extra, log_metric, **kwargs):
        calls.append(len(completions))
        if len(calls) in (2, 5):
            log_extra("a", [c.count("a") for c in completions])
            log_metric("share", len(calls) / 3)
        if len(calls) == 3:
            log_extra("short", completions[:3])
        return letter_reward(prompts, completions)

    trainer = make(tmp_path, reward=graded, rollout_chunk_size=8, log_completions=True)
    trainer.train()
    assert calls == [8] * 6
    assert log_of(trainer, "share") == [2 / 3, 5 / 3]
    tables = [pandas.read_parquet(path) for path in sorted((tmp_path / "completions").iterdir())]
    assert [len(table) for table in tables] == [16] * 3
    assert [[*table["a"].notna()] for table in tables] == [
        [False] * 8 + [True] * 8,
        [False] * 16,
        [True] * 8 + [False] * 8,
    ]
    assert [*tables[1]["short"].notna()] == [True] * 3 + [False] * 13


def test_a_subclass_may_log_itself_and_may_override_what_logs(tmp_path):
    class Own(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            self._log_metric("own", len(prompts))
            self._log_completion_extra("length", [len(ids) for ids in completion_ids_list])
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

        def _log_metric(self, name, value):
            super()._log_metric(f"renamed/{name}", value)

    def graded(prompts, completions, log_metric, log_extra, **kwargs):
        log_metric("n", len(completions))
        log_extra("text", completions)
        return letter_reward(prompts, completions)

    trainer = make(tmp_path, reward=graded, cls=Own, rollout_chunk_size=8, max_steps=2, log_completions=True)
    trainer.train()
    assert log_of(trainer, "renamed/own") == [16.0, 16.0]
    assert log_of(trainer, "renamed/n") == [8.0, 8.0]
    table = pandas.read_parquet(max((tmp_path / "completions").iterdir()))
    assert [*table["text"]] == [*table["completion"]]
    assert len(table["length"]) == 16
    assert table["length"].notna().all()
