"""Rewards: what is no reward is an error that names the function, the row and the value; everything else passes."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import accelerate
import numpy as np
import pytest
import torch

from grpo_ext.algorithms.exact import exact_mean
from grpo_ext.errors import RewardError, shortened
from grpo_ext.rewards.guard import Faults, RewardCall, columns_of, metrics_of
from tests.support.rewards import STRICT, score

PROMPTS = ["what is 2+2?", "what is 3+3?", "what is 4+4?"]
COMPLETIONS = ["four", "seven", "eight"]


@pytest.fixture(scope="module", autouse=True)
def state():
    accelerate.PartialState()  # the logger asks it which process this is


def synchronous(result) -> Callable:
    def graded(prompts, completions, **kwargs):
        if isinstance(result, Exception):
            raise result
        return result

    return graded


def call(function: Callable, faults: Faults = STRICT) -> list[float | None]:
    """The rewards of one call."""
    rewards, _ = score([function], faults=faults, chunk=None, completions=COMPLETIONS)
    return rewards[0]


# ---- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_a_wrong_number_of_rewards_is_refused(count):
    with pytest.raises(RewardError, match=f"'graded' returned {count} rewards for 3 completions; return one number or"):
        call(synchronous([1.0] * count))


@pytest.mark.parametrize("result", [None, 1.0, torch.tensor(1.0)])
def test_what_is_no_list_is_refused(result):
    with pytest.raises(RewardError, match=r"'graded' returned .*, which is no list; .* each of the 3 completions"):
        call(synchronous(result))


@pytest.mark.parametrize(
    "value",
    [math.nan, "1.0", [1.0], float, 10**400, 1e39, np.array([1.0, 2.0]), torch.tensor([-math.inf]), torch.tensor([])],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_finite_number_is_refused_with_function_row_value_and_text(value):
    """In float32, in which 1e39 is infinite."""
    with pytest.raises(RewardError) as caught:
        call(synchronous([0.0, 0.0, value]))
    message = str(caught.value)
    assert f"'graded' returned {shortened(repr(value), 120)} in row 2 " in message
    assert PROMPTS[2] in message
    assert COMPLETIONS[2] in message
    assert "a reward is a finite number, or None where the function does not apply" in message


def test_a_function_that_raises_is_named_with_its_error_and_the_remedy():
    error = KeyError("answer")
    with pytest.raises(RewardError) as caught:
        call(synchronous(error))
    message = str(caught.value)
    assert f"'graded' raised {type(error).__name__}: {error}" in message
    assert "return None for completions it cannot score" in message
    assert caught.value.__cause__ is error


def test_an_interruption_is_no_reward_error():
    def interrupt(**kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(interrupt)


# ---- What passes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, -2.5], [1.0, 0.0, -2.5]),
        ([True, False, True], [1.0, 0.0, 1.0]),
        ([None, 1.0, None], [None, 1.0, None]),
        ([np.float32(0.5), np.int64(2), np.bool_(True)], [0.5, 2.0, 1.0]),
        ([np.array(0.5), np.float64(1.5), np.float16(2.0)], [0.5, 1.5, 2.0]),
        (np.array([0.5, 1.0, 2.0], dtype=np.float32), [0.5, 1.0, 2.0]),
        ([torch.tensor(0.5), torch.tensor([2.0]), torch.tensor(True)], [0.5, 2.0, 1.0]),
        (torch.tensor([0.5, 1.0, 2.0], dtype=torch.bfloat16), [0.5, 1.0, 2.0]),
        ([Fraction(1, 2), Decimal("0.5"), 1], [0.5, 0.5, 1.0]),
    ],
    ids=repr,
)
def test_numbers_of_every_kind_and_none_pass(rewards, expected):
    found = call(synchronous(rewards))
    assert found == expected
    assert all(value is None or type(value) is float for value in found)


# ---- Calls by chunks, and what they log -----------------------------------------------------------------------------


def test_a_share_is_scored_chunk_by_chunk_with_everything_that_has_an_entry_for_each_completion():
    seen = []

    def graded(completions, **kwargs):
        seen.append({"completions": completions, **kwargs})
        return [len(c) for c in completions]

    settings = {"environments": list("vwxyz"), "state": [0, 1, 2, 3, 4]}
    rewards, calls = score([graded, graded], level=[1, 2, 3, 4, 5], **settings)
    assert rewards == [[1, 2, 3, 4, 5]] * 2
    for chunks in (seen[:3], seen[3:]):
        assert [chunk["completions"] for chunk in chunks] == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
        assert [chunk["level"] for chunk in chunks] == [[1, 2], [3, 4], [5]]
        assert [chunk["environments"] for chunk in chunks] == [["v", "w"], ["x", "y"], ["z"]]
        assert all(chunk["trainer_state"] == [0, 1, 2, 3, 4] for chunk in chunks)
    places = [(call.first, call.rows, call.number) for call in calls]
    assert places == [(20, 2, 0), (20, 2, 1), (22, 2, 0), (22, 2, 1), (24, 1, 0), (24, 1, 1)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_failed_try_logged_does_not_count(asynchronous):
    tries: list[str] = []

    def graded(completions, log_metric, **kwargs):
        tries.append(completions[0])
        log_metric("tries", len(tries))
        if tries.count(completions[0]) == 1 and completions[0] == "ccc":
            raise ConnectionError
        return [0.0] * len(completions)

    async def later(**kwargs):
        return graded(**kwargs)

    _, calls = score([later if asynchronous else graded], faults=Faults(retries=1))
    assert len(tries) == 4
    assert len([value for call in calls for _, value in call.metrics]) == 3


def test_a_chunk_that_fails_for_good_gets_none_and_the_others_their_rewards():
    def graded(completions, log_metric, **kwargs):
        log_metric("n", len(completions))
        if "ccc" in completions:
            raise ConnectionError
        return [1.0] * len(completions)

    rewards, calls = score([graded], faults=Faults(on_failure="none"))
    assert rewards == [[1.0, 1.0, None, None, 1.0]]
    assert metrics_of(calls) == {"n": [2.0, 1.0]}


def made(first: int, rows: int, number: int = 0, metrics: Any = (), **columns: list[Any]) -> RewardCall:
    return RewardCall(f"function_{number}", number, first, rows, list(metrics), columns)


def test_metrics_are_the_exact_mean_of_their_calls_in_any_order():
    calls = [made(i, 1, metrics=[("m", value)]) for i, value in enumerate([0.1, 1e16, -1e16, 0.3, 1e-9])]
    for some in (calls, calls[::-1], calls[2:] + calls[:2]):
        assert exact_mean(metrics_of(some)["m"]) == math.fsum([0.1, 0.3, 1e-9]) / 5
    assert math.isnan(exact_mean([1.0, math.nan]))


def test_a_column_has_an_entry_for_each_completion_and_says_what_is_missing(caplog):
    calls = [made(0, 2, x=[1, 2]), made(2, 2, y=["a"]), made(4, 2, x=[5, 6, 7]), made(4, 2, 1, y=["e", "f"])]
    table = columns_of(calls, 6)
    assert table == {"x": [1, 2, None, None, 5, 6], "y": [None, None, "a", None, "e", "f"]}
    assert "'function_0' logged 1 value(s) in the column 'y' for 2 completions" in caplog.text
    assert "'function_0' logged 3 value(s) in the column 'x' for 2 completions" in caplog.text
    caplog.clear()
    columns_of(calls, 6)
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
        await asyncio.sleep(begin())
        return [1.0, 2.0, 3.0]

    def yielding(**kwargs: Any) -> Iterator[float]:
        yield from plain()

    return {"sync": plain, "async": later, "generator": yielding}[kind]


KINDS = pytest.mark.parametrize("kind", ["sync", "async", "generator"])


@KINDS
@pytest.mark.parametrize("hang", [0.0, 30.0])
def test_a_call_that_fails_now_and_then_is_made_again(kind, hang, caplog):
    calls: list[int] = []
    faults = Faults(timeout=0.2 if hang else None, retries=1)
    assert call(unreliable(1, kind, calls, hang), faults) == [1.0, 2.0, 3.0]
    assert len(calls) == 2
    assert "'graded' failed" in caplog.text
    assert "try 2 of 2 follows" in caplog.text


@KINDS
@pytest.mark.parametrize(("hang", "says"), [(0.0, "judge is away"), (30.0, "no answer within reward_timeout=0.2")])
def test_after_the_last_try_it_is_an_error_or_none_as_configured(kind, hang, says, caplog):
    faults, calls = Faults(timeout=0.2, retries=0), []
    with pytest.raises(RewardError, match=f"'graded' raised .*{says}"):
        call(unreliable(9, kind, calls, hang), faults)
    assert len(calls) == 1
    faults = Faults(timeout=0.2, retries=0, on_failure="none")
    assert call(unreliable(9, kind, [], hang), faults) == [None] * 3
    assert "its 3 completions get None" in caplog.text


def test_without_a_timeout_a_function_runs_where_it_always_did():
    calls: list[int] = []
    call(unreliable(0, "sync", calls), Faults())
    call(unreliable(0, "sync", calls), Faults(timeout=5.0))
    assert calls[0] == threading.get_ident() != calls[1]


def test_what_is_no_reward_is_an_error_at_once_whatever_is_configured():
    calls: list[int] = []

    def wrong(**kwargs: Any) -> list[float]:
        calls.append(1)
        return [math.nan] * 3

    with pytest.raises(RewardError, match="nan in row 0"):
        call(wrong, Faults(timeout=5.0, retries=3, on_failure="none"))
    assert len(calls) == 1
