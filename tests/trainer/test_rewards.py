"""Reward functions in the trainer: the user's own objects, called by chunks, and what they log."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math

import pandas
import pytest
import trl

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.drop_in import CountingGame, conversations, log_of, make
from tests.support.tiny import config_kwargs, letter_reward, prompts, stock_scores, tiny_model, tiny_tokenizer


def plain(prompts, completions, **kwargs):
    """Whether it has an a."""
    return [float("a" in c) for c in completions]


async def later(prompts, completions, **kwargs):
    return plain(prompts, completions)


class Object:
    __name__ = "graded"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts, completions, **kwargs):
        self.calls += 1
        return plain(prompts, completions)

    def method(self, prompts, completions, **kwargs):
        return plain(prompts, completions)


class LaterObject(Object):
    async def __call__(self, prompts, completions, **kwargs):
        return plain(prompts, completions)


@pytest.mark.parametrize("trainer_class", [pytest.param(trl.GRPOTrainer, marks=stock_scores), GRPOTrainer])
def test_reward_functions_stay_the_objects_they_are(tmp_path, trainer_class):
    functions = [
        plain,
        later,
        lambda completions, prompts, **kwargs: plain(prompts, completions),
        functools.partial(plain, extra=1),
        functools.partial(later, extra=1),
        Object(),
        LaterObject(),
        Object().method,
    ]
    kwargs = config_kwargs(tmp_path, per_device_train_batch_size=16, max_steps=1)
    del kwargs["global_batch_size"]
    chunk = kwargs.pop("rollout_chunk_size")
    args = trl.GRPOConfig(**kwargs)
    if trainer_class is GRPOTrainer:
        args = GRPOConfig(**kwargs, rollout_chunk_size=chunk)
    trainer = trainer_class(tiny_model(), functions, args, prompts(), processing_class=tiny_tokenizer())

    def check():
        assert all(mine is given for mine, given in zip(trainer.reward_funcs, functions))
        for function in trainer.reward_funcs:
            assert inspect.signature(function) is not None
            order = (["x"], ["a"]) if "<lambda>" not in str(function) else (["a"], ["x"])
            found = function(*order)
            found = asyncio.run(found) if asyncio.iscoroutine(found) else found
            assert found == [1.0]
        assert trainer.reward_funcs[0].__name__ == "plain"
        assert trainer.reward_funcs[0].__doc__ == "Whether it has an a."

    check()
    before = functions[5].calls
    trainer.train()
    assert functions[5].calls - before == (2 if trainer_class is GRPOTrainer else 1)
    check()


class Silent(CountingGame):
    """An environment without a reward."""

    get_reward = None


class Judged(CountingGame):
    async def get_reward(self) -> float:
        return 0.25


def test_rewards_of_environments_are_called_with_environments_alone(tmp_path, tool_tokenizer):
    model = tiny_model(max_position_embeddings=4096)
    model.resize_token_embeddings(len(tool_tokenizer))
    rows = conversations(8)
    names = ["game", "silent", "judged", "game"] * 2
    trainer = make(
        tmp_path,
        model=model,
        rewards=None,
        dataset=rows.add_column("environment", names),
        tokenizer=tool_tokenizer,
        extra={"environment_factory": {"game": CountingGame, "silent": Silent, "judged": Judged}},
        max_completion_length=4,
        max_steps=1,
        rollout_chunk_size=4,
    )
    assert trainer.reward_func_names == ["CountingGame", "Judged"]
    some = [CountingGame(), Silent(), Judged(), CountingGame()]
    for environment in some:
        environment.reset()
    some[3].guess(1)

    def check():
        assert trainer.reward_funcs[0](environments=some) == [0.0, None, None, 1.0]
        assert asyncio.run(trainer.reward_funcs[-1](environments=some)) == [None, None, 0.25, None]

    check()
    trainer.train()
    check()
    assert log_of(trainer, "rewards/Judged/mean") == [0.25]


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

    trainer = make(tmp_path, rewards=graded, max_steps=3, log_completions=True)
    trainer.train()
    assert calls == [8] * 6
    assert log_of(trainer, "share") == [2 / 3, 5 / 3]
    tables = [pandas.read_parquet(path) for path in sorted((tmp_path / "out" / "completions").iterdir())]
    assert [len(table) for table in tables] == [16] * 3
    assert [[*table["a"].notna()] for table in tables] == [
        [False] * 8 + [True] * 8,
        [False] * 16,
        [True] * 8 + [False] * 8,
    ]
    assert [*tables[1]["short"].notna()] == [True] * 3 + [False] * 13


@pytest.mark.parametrize("dynamic", [False, True])
def test_metrics_of_a_rollout_batch_are_the_exact_mean_over_its_calls(tmp_path, dynamic):
    logged = []

    def graded(prompts, completions, number, log_metric, **kwargs):
        value = 0.1 * sum(number) + len(logged)
        logged.append((kwargs["trainer_state"].global_step, value))
        log_metric("value", value)
        return [float(i % 4) if n % 3 == 0 else 0.5 for i, n in enumerate(number)]

    rows = prompts(24).add_column("number", list(range(24)))
    trainer = make(tmp_path, rewards=graded, dataset=rows, dynamic_sampling=dynamic, max_steps=2)
    trainer.train()
    for step, mean in enumerate(log_of(trainer, "value")):
        values = [value for at, value in logged if at == step]
        assert (len(values) > 2) is dynamic
        assert mean == math.fsum(values) / len(values)


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

    args = GRPOConfig(**config_kwargs(tmp_path / "out", log_completions=True))
    trainer = Own(tiny_model(), graded, args, prompts(), processing_class=tiny_tokenizer())
    trainer.train()
    assert log_of(trainer, "renamed/own") == [16.0, 16.0]
    assert log_of(trainer, "renamed/n") == [8.0, 8.0]
    table = pandas.read_parquet(max((tmp_path / "out" / "completions").iterdir()))
    assert [*table["text"]] == [*table["completion"]]
    assert len(table["length"]) == 16
    assert table["length"].notna().all()
