"""What tests of reward functions share: the runner on rows of letters, a loop for asynchronous functions, workers."""

import asyncio
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from grpo_ext.rewards.guard import Faults
from grpo_ext.rewards.runner import RewardFunctions, RewardRows, RewardRunner
from grpo_ext.rewards.worker import RewardCall
from grpo_ext.rewards.workers import RewardWorkers

COMPLETIONS = ["a", "bb", "ccc", "dddd", "eeeee"]
STRICT = Faults()
PATIENCE_S = 60.0  # waited for in full by a test that fails alone


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An asynchronous loop on a thread of its own, as TRL's trainer has one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def functions_of(functions: Sequence[Any]) -> RewardFunctions:
    """Functions by the names function_0, function_1 and so on."""
    return RewardFunctions(functions, [f"function_{n}" for n in range(len(functions))], [None] * len(functions), {})


def score(
    functions: Sequence[Any],
    workers: RewardWorkers | None = None,
    faults: Faults = STRICT,
    chunk: int | None = 2,
    completions: Sequence[str] = COMPLETIONS,
    **settings: Any,
) -> tuple[list[list[float | None]], list[RewardCall]]:
    """The rewards of each function, and the calls, in the order of the completions; the first is completion 20."""
    size = len(completions)
    inputs = [{"answer": answer, "level": level} for level, answer in enumerate("abcde"[:size], start=1)]
    rows = RewardRows(inputs, list("pqrst"[:size]), [*completions], [[1]] * size, first=20, chunk=chunk, **settings)
    with running_loop() as loop:
        rewards_BF, calls = RewardRunner(torch.device("cpu"), faults, workers, loop).compute(
            functions_of(functions), rows
        )
    rewards = [[None if math.isnan(value) else value for value in column] for column in rewards_BF.T.tolist()]
    return rewards, sorted(calls, key=lambda call: (call.first, call.number))


@contextmanager
def working(number: int = 1, seed: int = 0) -> Iterator[RewardWorkers]:
    """Workers that are killed at the end."""
    workers = RewardWorkers(number, seed)
    try:
        yield workers
    finally:
        workers.kill()


def _by_value() -> Callable[..., Any]:
    """A function that goes to a worker by value: this file takes seconds to import."""

    def process_id(completions, **kwargs):
        return [os.getpid()] * len(completions)

    return process_id


process_id = _by_value()
process_id.__name__ = "its_process_id"  # is looked up by this name
