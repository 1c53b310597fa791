"""`RewardRunner` calls functions by chunks; tests/parity compares what it gives with stock TRL."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from grpo_ext.errors import RewardError
from grpo_ext.rewards.guard import Faults
from grpo_ext.rewards.runner import RewardFunctions, RewardRows, RewardRunner
from tests.support.rewards import functions_of, running_loop, score
from tests.support.tiny import tiny_config, tiny_tokenizer

INPUTS = [
    {"prompt": p, "completion": "left out", "answer": p[::-1], "level": i} for i, p in enumerate(["ab", "c", "de"])
]
IDS = [[3, 4, 4, 3], [5, 5], [7, 6, 6]]


def rows(**settings: Any) -> RewardRows:
    return RewardRows(INPUTS, ["ab", "c", "de"], ["abba", "cc", "edd"], IDS, **settings)


async def later(completions, **kwargs):
    return [0.1 * len(c) for c in completions]


def sparse(completions, level, **kwargs):
    return [None if n == 1 else 1.0 / 3.0 for n in level]


def test_a_data_column_gives_way_to_what_trl_hands_over():
    def graded(trainer_state, log_metric, environments, **kwargs):
        assert trainer_state == 7
        log_metric("m", 1.0)
        return [float(value) for value in environments]

    def scored(columns: dict[str, Any], environments: Any = None) -> list[list[float]]:
        inputs = [{**row, **columns} for row in INPUTS]
        taken = dataclasses.replace(rows(environments=environments, state=7), inputs=inputs)
        return RewardRunner(torch.device("cpu")).compute(functions_of([graded]), taken)[0].tolist()

    columns = {"trainer_state": "x", "log_metric": "x", "environments": 5}
    assert scored(columns) == [[5.0]] * 3
    assert scored(columns, [1, 2, 3]) == [[1.0], [2.0], [3.0]]
    with pytest.raises(TypeError, match="multiple values for keyword argument 'prompts'"):
        scored({"prompts": "x"}, [1, 2, 3])


def test_an_environment_that_is_retired_has_no_reward_and_reward_functions_see_it():
    class Slotted:
        __slots__ = ()

        def get_reward(self) -> float:
            return 1.0

    def of_slotted(environments, _env_type=Slotted, **kwargs):
        return [e.get_reward() if type(e) is _env_type else None for e in environments]

    def others(environments, **kwargs):
        return [float(isinstance(e, Slotted)) for e in environments]

    some = [Slotted() for _ in range(3)]
    sources = RewardFunctions([of_slotted, others], ["a", "b"], [None, None])
    scored = rows(environments=some, retired={id(some[1])})
    rewards_BF, _ = RewardRunner(torch.device("cpu")).compute(sources, scored)
    assert rewards_BF.nan_to_num(-1.0).tolist() == [[1.0, 1.0], [-1.0, 1.0], [1.0, 1.0]]


def test_a_reward_model_scores_all_rows_in_one_forward_and_keeps_company_by_itself():
    model = AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=1))
    shapes, called = [], []

    def graded(completions, **kwargs):
        called.append(len(completions))
        return [0.0] * len(completions)

    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    sources = RewardFunctions([graded, model], ["graded", "scorer"], [None, tiny_tokenizer()])
    runner = RewardRunner(torch.device("cpu"))
    runner.compute(sources, rows(chunk=1))
    assert (called, shapes) == ([1, 1, 1], [3])
    runner.join_remaining_forwards(sources, rows())
    assert (called, shapes) == ([1, 1, 1], [3, 3])


def test_a_share_is_scored_chunk_by_chunk_with_everything_that_has_an_entry_for_each_completion():
    received = []

    def graded(completions, **kwargs):
        received.append({"completions": completions, **kwargs})
        return [len(c) for c in completions]

    rewards, calls = score([graded, graded], environments=list("vwxyz"), state=[0, 1, 2, 3, 4])
    assert rewards == [[1, 2, 3, 4, 5]] * 2
    for chunks in (received[:3], received[3:]):
        assert [chunk["completions"] for chunk in chunks] == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
        assert [chunk["level"] for chunk in chunks] == [[1, 2], [3, 4], [5]]
        assert [chunk["environments"] for chunk in chunks] == [["v", "w"], ["x", "y"], ["z"]]
        assert all(chunk["trainer_state"] == [0, 1, 2, 3, 4] for chunk in chunks)
    places = [(call.first, call.rows, call.number) for call in calls]
    assert places == [(20, 2, 0), (20, 2, 1), (22, 2, 0), (22, 2, 1), (24, 1, 0), (24, 1, 1)]


def test_chunks_of_all_asynchronous_functions_run_at_once_on_the_loop_after_the_synchronous_ones():
    events: list[str] = []
    threads: set[int] = set()
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("around the training")

    def graded(completions, **kwargs):
        events.append("sync")
        return [1.0] * len(completions)

    async def meets(completions, **kwargs):
        events.append("async")
        threads.add(threading.get_ident())
        assert variable.get() == "around the training"
        while events.count("async") < 6:
            await asyncio.sleep(0.001)
        return [2.0] * len(completions)

    rewards, _ = score([meets, graded, meets], faults=Faults(timeout=30.0))
    assert rewards == [[2.0] * 5, [1.0] * 5, [2.0] * 5]
    assert events == ["sync"] * 3 + ["async"] * 6
    assert threading.get_ident() not in threads
    assert len(threads) == 1


def test_an_asynchronous_function_that_fails_for_good_ends_those_that_run_or_wait_for_another_try():
    events: list[str] = []

    async def waits(completions, **kwargs):
        events.append("waits")
        try:
            await asyncio.sleep(60)
        finally:
            events.append("cancelled")

    async def tries(completions, **kwargs):
        while events.count("fails") < 2:
            await asyncio.sleep(0.001)
        events.append("tries")
        raise OSError("later")

    async def fails(completions, **kwargs):
        events.append("fails")
        while events.count("fails") == 2 and not {"waits", "tries"} <= set(events):
            await asyncio.sleep(0.001)
        raise ValueError("no score today")

    with running_loop() as loop:
        before = set(threading.enumerate())
        runner = RewardRunner(torch.device("cpu"), Faults(retries=1), async_loop=loop)
        with pytest.raises(RewardError, match="'function_0' raised ValueError: no score today"):
            runner.compute(functions_of([fails, waits, tries]), rows())
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()  # after the cancellation
    assert sorted(events) == ["cancelled", "fails", "fails", "tries", "waits"]


def test_an_asynchronous_function_without_a_loop_is_refused_with_the_remedy():
    with pytest.raises(RewardError, match=r"'function_1' is asynchronous, .* when the trainer is built"):
        RewardRunner(torch.device("cpu")).compute(functions_of([sparse, later]), rows())


def test_a_process_without_completions_calls_nothing():
    empty = RewardRows([], [], [], [])
    rewards_BF, calls = RewardRunner(torch.device("cpu")).compute(functions_of([sparse, later]), empty)
    assert rewards_BF.shape == (0, 2)
    assert calls == []
