"""Reward functions in the trainer: called by chunks, what they log, and what runs in `reward_workers`."""

import contextlib
import gc
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pandas
import psutil
import pytest

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError, RewardError
from tests.support.selection import few_of
from tests.support.tiny import prompts
from tests.support.trainers import log_of, make, on, ran, watched


def test_a_subclass_may_log_beside_its_reward_functions(tmp_path):
    class Own(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            self._log_metric("own", len(prompts))
            self._log_completion_extra("length", [len(ids) for ids in completion_ids_list])
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    graded = watched(lambda completions, log_extra, **columns: log_extra("text", completions))
    trainer = ran(make(tmp_path, reward=graded, cls=Own, rollout_chunk_size=8, max_steps=2, log_completions=True))
    assert log_of(trainer, "own") == [16.0, 16.0]
    table = pandas.read_parquet(max((tmp_path / "completions").iterdir()))
    assert [*table["text"]] == [*table["completion"]]
    assert (len(table["length"]), table["length"].notna().all()) == (16, True)


@pytest.mark.parametrize(
    ("changed", "shape"),
    [
        (lambda rewards: rewards[:8], r"\(8, 1\)"),
        (lambda rewards: rewards.repeat(1, 2), r"\(16, 2\)"),
        (lambda rewards: rewards[:, 0], r"\(16,\)"),
        (lambda rewards: None, "NoneType"),
    ],
    ids=["rows", "columns", "one_dimension", "nothing"],
)
def test_rewards_of_another_shape_are_refused(tmp_path, changed, shape):
    class Own(GRPOTrainer):
        def _calculate_rewards(self, *args):
            return changed(super()._calculate_rewards(*args))

    says = rf"_calculate_rewards returned .* {shape} where \(16, 1\) is needed: .*row for .*column for .* super\(\)"
    with pytest.raises(RewardError, match=says):
        make(tmp_path, cls=Own).train()


@pytest.mark.full
def test_an_evaluation_and_a_function_that_a_callback_puts_in_place_run_there_too(tmp_path):
    here = os.getpid()

    def elsewhere(kind: float) -> Callable[..., Any]:
        def graded(completions, **kwargs):
            return [kind * (os.getpid() != here) for _ in completions]

        return graded

    def replace(state: Any) -> None:
        trainer.reward_funcs[0] = elsewhere(2.0 + state.global_step)

    trainer = make(tmp_path, reward=elsewhere(1.0), reward_workers=1, max_steps=2)
    trainer.add_callback(on("on_step_end", replace))
    trainer.train()
    assert log_of(trainer, "reward") == [1.0, 3.0]
    assert trainer.evaluate(prompts(4))["eval_reward"] == 4.0


@pytest.mark.parametrize("fails", few_of([False, True], [False]))
def test_workers_end_with_the_training(tmp_path, fails):
    def look(state: Any) -> None:
        assert psutil.pid_exists(int((tmp_path / "pid").read_text()))
        if fails:
            raise KeyboardInterrupt

    def graded(completions: list[str], **columns: Any) -> list[float]:  # sent by value: a worker imports no TRL for it
        (tmp_path / "pid").write_text(str(os.getpid()))
        return [float(len(text)) for text in completions]

    trainer = make(tmp_path, reward=graded, reward_workers=1, max_steps=1)
    trainer.add_callback(on("on_step_end", look))
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        trainer.train()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_function_that_cannot_be_sent_is_named_before_training(tmp_path):
    database = sqlite3.connect(":memory:")

    def stored(completions, **kwargs):
        return [float(database.in_transaction) for _ in completions]

    with pytest.raises(ConfigError, match=r"'stored' cannot be sent .* reward_workers=1 .*at its first call"):
        make(tmp_path, reward=stored, reward_workers=1)


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "GRPOTrainer-AsyncLoop"]


def test_the_thread_of_asynchronous_functions_ends_with_its_trainer(tmp_path):
    async def graded(completions, **columns):
        return [float(len(text)) for text in completions]

    before = loops()
    trainer = ran(make(tmp_path, reward=graded, max_steps=1))
    trainer.args.max_steps = 2
    trainer.train()  # it works again
    trainer.evaluate(prompts(2))
    (thread,) = [thread for thread in loops() if thread not in before]
    alive = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert alive() is None
    thread.join(10)
    assert not thread.is_alive()
    assert loops() == before
