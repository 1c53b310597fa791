"""`RewardRunner` calls functions by chunks; tests/parity compares what it gives with stock TRL."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from grpo_ext.errors import RewardError
from grpo_ext.rewards.guard import Faults
from grpo_ext.rewards.runner import RewardRows, RewardRunner
from tests.support.rewards import functions_of, running_loop, score

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
