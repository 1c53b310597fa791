"""`RewardRunner` calls functions by chunks; tests/parity compares what it gives with stock TRL."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from grpo_ext.errors import RewardError
from grpo_ext.rewards.guard import Faults
from grpo_ext.rewards.runner import RewardRows, RewardRunner
from tests.support.rewards import functions_of, running_loop

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
