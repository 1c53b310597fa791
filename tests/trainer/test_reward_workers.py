"""`reward_workers` in the trainer: the same run for every number of them, and what is refused before training."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from typing import Any

import pandas
import psutil
import pytest
import torch
from transformers import TrainerCallback

from grpo_ext import GRPOConfig
from grpo_ext.errors import ConfigError, RewardError
from grpo_ext.tools.check.comparison import metric_difference
from tests.support.drop_in import CountingGame, conversations, log_of, make
from tests.support.tiny import config_kwargs, prompts
from tests.support.trainers import parameters

LOGGED = ("share", "length_of_chunk")


def functions(factor: float = 1.0) -> list[Callable[..., Any]]:
    """Functions that go to a worker by value, so that none imports this file: they look beyond the group, and log."""

    def graded(prompts, completions, answer, trainer_state, log_metric, log_extra, **kwargs):
        mean = sum(map(len, completions)) / len(completions)
        log_metric("length_of_chunk", mean)
        log_metric("share", trainer_state.global_step + trainer_state.epoch)
        log_extra("gold", answer)
        return [factor * sum(c in p for c in text) - abs(len(text) - mean) for p, text in zip(prompts, completions)]

    def sparse(completions, **kwargs):
        yield from (None if len(text) % 3 == 0 else float("a" in text) for text in completions)

    async def later(completions, log_metric, **kwargs):
        log_metric("later", len(completions))
        return [0.1 * len(text) for text in completions]

    return [graded, sparse, later]


def trained(folder: Any, workers: int, **settings: Any) -> Any:
    rewards = settings.pop("rewards", None) or functions()
    trainer = make(folder, rewards=rewards, reward_workers=workers, log_completions=True, max_steps=3, **settings)
    trainer.train()
    return trainer


def tables(folder: Any) -> list[dict[str, Any]]:
    return [pandas.read_parquet(path).to_dict("list") for path in sorted((folder / "out" / "completions").iterdir())]


@pytest.mark.parametrize("settings", [{"rollout_lag": 1}, {"dynamic_sampling": True}], ids=["lag", "dynamic"])
def test_rewards_logs_and_parameters_are_the_same_for_every_number_of_workers(tmp_path, settings):
    runs = {n: trained(tmp_path / str(n), n, **settings) for n in (0, 2)}
    one, tables_of_one = runs[0], tables(tmp_path / "0")
    assert all(log_of(one, name) for name in (*LOGGED, "later", "rewards/sparse/mean"))
    assert all(table["gold"].count(None) == 0 for table in tables_of_one)
    assert metric_difference(one.state.log_history, runs[2].state.log_history) == (0.0, "")
    assert torch.equal(parameters(one), parameters(runs[2]))
    assert repr(tables(tmp_path / "2")) == repr(tables_of_one)
    control = trained(tmp_path / "control", 2, rewards=functions(1.5), **settings)
    assert not torch.equal(parameters(one), parameters(control))


def test_an_evaluation_and_a_function_that_a_callback_puts_in_place_run_there_too(tmp_path):
    here = os.getpid()

    def elsewhere(kind: float) -> Callable[..., Any]:
        def graded(completions, **kwargs):
            return [kind * (os.getpid() != here) for _ in completions]

        return graded

    class Replaces(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.reward_funcs[0] = elsewhere(2.0 + state.global_step)

    trainer = make(tmp_path, rewards=elsewhere(1.0), reward_workers=1, max_steps=2)
    trainer.add_callback(Replaces())
    trainer.train()
    assert log_of(trainer, "reward") == [1.0, 3.0]
    assert trainer.evaluate(prompts(4))["eval_reward"] == 4.0


def hanging(folder: Any) -> Callable[..., Any]:
    """Hangs in the call of the second step that holds the first completion."""

    def graded(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 1 and not (folder / "pid").exists():
            (folder / "pid").write_text(str(os.getpid()))
            while True:
                pass
        return [float(len(c)) for c in completions]

    return graded


@pytest.mark.parametrize("lag", [0, 1])
def test_a_function_that_hangs_is_killed_and_the_run_goes_on(tmp_path, lag):
    settings = {"reward_timeout": 1.0, "max_steps": 3, "rollout_lag": lag, "reward_workers": 1}
    trainer = make(tmp_path, rewards=hanging(tmp_path), reward_on_failure="none", **settings)
    trainer.train()
    assert trainer.state.global_step == 3
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid)
    (tmp_path / "pid").unlink()
    trainer = make(tmp_path / "again", rewards=hanging(tmp_path), **settings)
    with pytest.raises(RewardError, match=r"'graded' raised CallTimeout: no answer within reward_timeout=1\.0"):
        trainer.train()


@pytest.mark.parametrize("fails", [False, True])
def test_workers_end_with_the_training(tmp_path, fails):
    def graded(completions, **kwargs):
        (tmp_path / "pid").write_text(str(os.getpid()))
        return [float(len(c)) for c in completions]

    class Looks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            assert psutil.pid_exists(int((tmp_path / "pid").read_text()))
            if fails:
                raise KeyboardInterrupt

    trainer = make(tmp_path, rewards=graded, reward_workers=1, max_steps=1)
    trainer.add_callback(Looks())
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        trainer.train()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_function_that_cannot_be_sent_is_named_before_training(tmp_path):
    database = sqlite3.connect(":memory:")

    def stored(completions, **kwargs):
        return [float(database.in_transaction) for _ in completions]

    with pytest.raises(ConfigError, match=r"'stored' cannot be sent .* reward_workers=1 .*at its first call"):
        make(tmp_path, rewards=[*functions(), stored], reward_workers=1)


def test_environments_stay_in_the_training_process(tmp_path, tool_tokenizer):
    extra = {"environment_factory": CountingGame}
    with pytest.raises(ConfigError, match="reward_workers=2 with environment_factory"):
        make(tmp_path, rewards=None, dataset=conversations(), tokenizer=tool_tokenizer, extra=extra, reward_workers=2)


@pytest.mark.parametrize("value", [-1, 1.5])
def test_a_number_of_workers_that_is_none_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"reward_workers=.*0 or more"):
        GRPOConfig(**config_kwargs(tmp_path, reward_workers=value))
