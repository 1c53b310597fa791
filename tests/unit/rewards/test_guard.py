"""Rewards: what is no reward is an error that names the function, the row and the value; everything else passes."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import tenacity
import torch

from grpo_ext.algorithms.exact import exact_mean
from grpo_ext.errors import RewardError, shortened
from grpo_ext.rewards.guard import Faults, columns_of, metrics_of
from grpo_ext.rewards.runner import RewardRows, RewardRunner
from grpo_ext.rewards.worker import RewardCall
from tests.support.rewards import STRICT, functions_of, running_loop, score


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Before another try a call waits a fiftieth of the time."""
    wait = tenacity.wait_exponential
    monkeypatch.setattr(tenacity, "wait_exponential", lambda multiplier, max: wait(multiplier / 50, max))


def call(function: Callable, faults: Faults = STRICT) -> list[float | None]:
    """The rewards of three completions from one call."""
    return score([function], faults=faults, chunk=None, completions=["four", "seven", "eight"])[0][0]


# ---- What is a reward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "what"),
    [([1.0] * 2, "2 rewards"), ([1.0] * 4, "4 rewards"), (None, "None, which is not a list"), (1.0, "1.0, which is")],
)
def test_a_return_value_must_be_one_reward_for_each_completion(rewards, what):
    with pytest.raises(RewardError, match=f"'function_0' returned {what}.*; return .* each of the 3 completions"):
        call(lambda **kwargs: rewards)


@pytest.mark.parametrize(
    "value",
    [math.nan, "1.0", [1.0], float, 10**400, 1e39, np.array([1.0, 2.0]), torch.tensor([-math.inf]), torch.tensor([])],
    ids=lambda value: repr(value)[:20],
)
def test_rewards_must_be_finite_numbers(value):
    """In float32, in which 1e39 is infinite."""
    with pytest.raises(RewardError) as caught:
        call(lambda **kwargs: [0.0, 0.0, value])
    shown = f"'function_0' returned {shortened(repr(value), 120)} in row 2 (prompt 'r', completion 'eight'); "
    assert f"{shown}a reward is a finite number, or None where the function does not apply" in str(caught.value)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([True, None, -2.5], [1.0, None, -2.5]),
        ([np.array(0.5), np.float64(1.5), np.float16(2.0)], [0.5, 1.5, 2.0]),
        ([torch.tensor(0.5), torch.tensor([2.0]), torch.tensor(True)], [0.5, 2.0, 1.0]),
        ([Fraction(1, 2), Decimal("0.5"), 1], [0.5, 0.5, 1.0]),
    ],
    ids=repr,
)
def test_every_kind_of_number_and_none_pass(rewards, expected):
    assert call(lambda **kwargs: rewards) == expected


# ---- What calls log -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_logs_of_failed_attempts_do_not_count(asynchronous):
    failures = 1

    def graded(completions, log_metric, log_extra, **kwargs):
        nonlocal failures
        log_metric("n", len(completions))
        log_extra("n", completions)
        if "ccc" in completions and failures:
            failures -= 1
            raise ConnectionError
        return [1.0] * len(completions)

    async def later(**kwargs):
        return graded(**kwargs)

    function, retried, logged = later if asynchronous else graded, Faults(retries=1), []
    rewards, calls = score([function], faults=retried)
    assert (failures, rewards, metrics_of(calls)) == (0, [[1.0] * 5], {"n": [2.0, 2.0, 1.0]})
    failures = 1
    rewards, calls = score([function] * 2, faults=retried, log_extra=lambda name, values: logged.append(len(values)))
    assert (failures, metrics_of(calls), logged) == (0, {"n": [2.0, 2.0, 2.0, 2.0, 1.0, 1.0]}, [2, 2, 1] * 2)
    assert all(not call.columns for call in calls)
    failures = 2
    rewards, calls = score([function], faults=Faults(retries=1, on_failure="none"))
    assert (failures, rewards, metrics_of(calls)) == (0, [[1.0, 1.0, None, None, 1.0]], {"n": [2.0, 1.0]})


def logged(first: int, rows: int, number: int = 0, metrics: Any = (), **columns: list[Any]) -> RewardCall:
    return RewardCall(f"function_{number}", number, first, rows, list(metrics), columns)


def test_metrics_are_the_exact_mean_of_their_calls_in_any_order():
    calls = [logged(i, 1, metrics=[("m", value)]) for i, value in enumerate([0.1, 1e16, -1e16, 0.3, 1e-9])]
    for some in (calls, calls[::-1], calls[2:] + calls[:2]):
        assert exact_mean(metrics_of(some)["m"]) == math.fsum([0.1, 0.3, 1e-9]) / 5
    assert math.isnan(exact_mean([1.0, math.nan]))


def test_a_logged_column_has_one_entry_per_completion(caplog):
    calls = [logged(0, 2, x=[1, 2]), logged(2, 2, y=["a"]), logged(4, 2, x=[5, 6, 7]), logged(4, 2, 1, y=["e", "f"])]
    assert columns_of(calls, 6) == {"x": [1, 2, None, None, 5, 6], "y": [None, None, "a", None, "e", "f"]}
    for column in "xy":
        said = f"'function_0' does not log one value for each completion in the column '{column}'"
        assert caplog.text.count(said) == 1
    caplog.clear()
    columns_of(calls, 6)
    columns_of([logged(0, 4, x=[1, 2, 3]), logged(4, 1, y=[])], 5)  # other numbers are said no second time
    assert caplog.text == ""


# ---- Calls that hang or fail ----------------------------------------------------------------------------------------


def unreliable(failures: int, kind: str, calls: list[int], hang: float = 0.0) -> Callable:
    """A function that raises, or sleeps, the first times it is called."""

    def begin() -> float:
        calls.append(threading.get_ident())
        if len(calls) <= failures and not hang:
            raise ConnectionError("judge is away")
        return hang if len(calls) <= failures else 0.0

    def plain(**kwargs: Any) -> list[float]:
        time.sleep(begin())
        return [1.0, 2.0, 3.0]

    async def later(**kwargs: Any) -> list[float]:
        try:
            await asyncio.sleep(begin())
        except asyncio.CancelledError:
            calls.append(0)
            raise
        return [1.0, 2.0, 3.0]

    return {"sync": plain, "async": later}[kind]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(("hang", "says"), [(0.0, "judge is away"), (30.0, "no answer within reward_timeout=0.2")])
def test_calls_that_hang_or_fail_are_retried(kind, hang, says, caplog):
    calls: list[int] = []
    assert call(unreliable(1, kind, calls, hang), Faults(timeout=0.2, retries=1)) == [1.0, 2.0, 3.0]
    assert len([thread for thread in calls if thread]) == 2
    assert (0 in calls) is (kind == "async" and hang > 0.0)  # cancelled
    assert f"'function_0' failed ({'CallTimeout' if hang else 'ConnectionError'}: {says}" in caplog.text
    assert "try 2 of 2 follows" in caplog.text
    calls.clear()
    with pytest.raises(RewardError, match=f"'function_0' raised .*{says}"):
        call(unreliable(9, kind, calls, hang), Faults(timeout=0.2))
    assert len([thread for thread in calls if thread]) == 1
    assert call(unreliable(9, kind, [], hang), Faults(timeout=0.2, on_failure="none")) == [None] * 3
    assert "its 3 completions get None" in caplog.text


@pytest.mark.parametrize(("returned", "error"), [([math.nan] * 3, RewardError), (None, KeyboardInterrupt)])
def test_neither_an_invalid_reward_nor_an_interrupt_is_retried(returned, error):
    calls: list[int] = []

    def graded(**kwargs: Any) -> list[float]:
        calls.append(1)
        if returned is None:
            raise KeyboardInterrupt
        return returned

    with pytest.raises(error, match="nan in row 0" if returned else None):
        call(graded, Faults(timeout=5.0, retries=3, on_failure="none"))
    assert len(calls) == 1


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
        runner = RewardRunner(torch.device("cpu"), Faults(retries=1), None, loop)
        with pytest.raises(RewardError, match="'function_0' raised ValueError: no score today"):
            runner.compute(functions_of([fails, waits, tries]), RewardRows([{}] * 3, ["p"] * 3, ["c"] * 3, [[1]] * 3))
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()  # after the cancellation
    assert sorted(events) == ["cancelled", "fails", "fails", "tries", "waits"]


def test_an_asynchronous_function_without_a_loop_is_refused_with_the_remedy():
    async def later(completions, **kwargs):
        return [1.0]

    runner = RewardRunner(torch.device("cpu"), Faults(), None, None)
    with pytest.raises(RewardError, match=r"'function_0' is asynchronous, .* when the trainer is built"):
        runner.compute(functions_of([later]), RewardRows([{}], ["p"], ["c"], [[1]]))
