"""Reward functions, checked: what they return must be rewards, and an error names the function, the row, the value.

Differs from TRL: NaN, infinity and non-numbers are errors instead of silent zeros, `None` stays "does not apply", and a
call that hangs or fails now and then can be bounded in time and tried again. Used by rewards.runner.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

import torch
from accelerate.logging import get_logger
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_exponential,
)

from ..errors import RewardError, shortened
from .calls import RewardCall
from .worker import as_list

logger = get_logger(__name__)
_LARGEST = torch.finfo(torch.float32).max
ScoredChunk = tuple[list[float | None], RewardCall]  # the rewards of a call, and what it logged


def _short(value: Any) -> str:
    return shortened(repr(value), 120)


def check_rewards(name: str, rewards: Any, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | None]:
    """The rewards as floats or `None`.

    Raises:
        RewardError: not a sequence, the wrong number of values, or a value that is no finite number.
    """
    try:
        iterator = iter(rewards)
    except TypeError:
        raise RewardError(
            f"reward function '{name}' returned {_short(rewards)}, which is no list; return one number or None for"
            f" each of the {len(completions)} completions."
        ) from None
    try:
        values = list(iterator)
    except Exception as error:  # a generator runs only now
        raise _failed(name, error) from error
    if len(values) != len(completions):
        raise RewardError(
            f"reward function '{name}' returned {len(values)} rewards for {len(completions)} completions; return one "
            "number or None for each."
        )
    return [_checked(name, row, value, prompts[row], completions[row]) for row, value in enumerate(values)]


def _checked(name: str, row: int, value: Any, prompt: Any, completion: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    elif hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()  # numpy scalars
    if not isinstance(value, Real | Decimal) or not -_LARGEST <= _as_float(value) <= _LARGEST:  # NaN compares false
        raise RewardError(
            f"reward function '{name}' returned {_short(value)} in row {row} (prompt {_short(prompt)}, completion "
            f"{_short(completion)}); a reward is a finite number, or None where the function does not apply."
        )
    return float(value)


def _as_float(value: Any) -> float:
    """The number as a float; infinity for an integer that has none."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _failed(name: str, error: Exception) -> RewardError:
    remedy = "make it return None for completions it cannot score, and see the traceback above for where it failed."
    if isinstance(error, TypeError) and "argument" in str(error):
        remedy = (
            "it is called with prompts, completions, completion_ids and every column of the data by name: let it take "
            "**kwargs, and ask only for columns the data has."
        )
    remedy = getattr(error, "remedy", remedy)
    return RewardError(f"reward function '{name}' raised {type(error).__name__}: {error}; {remedy}")


@dataclass(frozen=True)
class Faults:
    """What is done about a reward function that hangs or raises.

    Attributes:
        timeout: seconds a call may take; None: any time.
        retries: further calls after one that failed.
        on_failure: after the last: "error", or "none" for `None` as the reward of every completion of the call.
    """

    timeout: float | None = None
    retries: int = 0
    on_failure: str = "error"

    def policy(self, name: str, ended: threading.Event | None = None) -> dict[str, Any]:
        """Keywords of tenacity's retry loops.

        Args:
            ended: once it is set, no further try is made.
        """

        def say(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            logger.warning(
                f"reward function '{name}' failed ({type(error).__name__}: {error}); try {state.attempt_number + 1} of "
                f"{self.retries + 1} follows."
            )

        last = stop_after_attempt(self.retries + 1)
        waiting = {} if ended is None else {"sleep": sleep_using_event(ended)}
        return waiting | {
            "stop": last if ended is None else last | stop_when_event_set(ended),
            "wait": wait_exponential(multiplier=0.5, max=30),
            "retry": retry_if_exception_type(Exception),
            "before_sleep": say,
            "reraise": True,
        }

    def after_the_last(self, name: str, error: Exception, completions: Sequence[Any]) -> list[float | None]:
        """The rewards of a call that failed for good.

        Raises:
            RewardError: unless failures count as "does not apply".
        """
        if self.on_failure != "none":
            raise _failed(name, error) from error
        logger.warning(
            f"reward function '{name}' failed ({type(error).__name__}: {error}); its {len(completions)} completions "
            "get None from it (reward_on_failure='none')."
        )
        return [None] * len(completions)


STRICT = Faults()


class CallTimeout(TimeoutError):
    """A call that did not return within the time that a setting gives it."""

    remedy = (
        "a larger reward_timeout gives it more time, reward_retries makes the call again, and reward_on_failure='none' "
        "goes on without."
    )

    def __init__(self, seconds: float | None, setting: str) -> None:
        super().__init__(f"no answer within {setting}={seconds} seconds")


def in_time(function: Callable[[], Any], seconds: float | None, setting: str) -> Any:
    """What `function` returns, within a time.

    Raises:
        CallTimeout: it did not return; the thread it ran in is left behind, as no thread can be stopped.
    """
    if seconds is None:
        return function()
    results: list[Any] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            results.append(context.run(function))
        except BaseException as error:  # of any kind; the calling thread raises it
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name=setting)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise CallTimeout(seconds, setting)
    return results[0]


@dataclass(frozen=True)
class GuardedCall:
    """A call of a reward function for one chunk: made as often as it may be tried, and its result checked.

    Attributes:
        function, name, number: the function, its name, its place among the reward functions.
        first: place of the chunk's first completion in the rollout batch, over all processes.
        keywords: of the call, without recorders.
        recorders: the user's own `log_metric` and `log_extra`; those that are missing record in the `RewardCall`.
        faults: what is done where the call hangs or raises.
    """

    function: Callable[..., Any]
    name: str
    number: int
    first: int
    keywords: dict[str, Any]
    recorders: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    faults: Faults = STRICT

    def _begin(self) -> tuple[RewardCall, dict[str, Any]]:
        # every try has a record of its own, so that what a failed one logged does not count
        call = RewardCall(self.name, self.number, self.first, len(self.keywords["completions"]))
        record = {"log_metric": call.log_metric, "log_extra": call.log_extra}
        return call, {**self.keywords, **record, **self.recorders}

    def _end(self, call: RewardCall, rewards: Any) -> ScoredChunk:
        return check_rewards(self.name, rewards, self.keywords["prompts"], self.keywords["completions"]), call

    def _fail(self, error: Exception) -> ScoredChunk:
        return self.faults.after_the_last(self.name, error, self.keywords["completions"]), self._begin()[0]

    def score(self, in_worker: Callable[..., Any] | None = None, ended: threading.Event | None = None) -> ScoredChunk:
        """The rewards of a synchronous function, and what it logged.

        Args:
            in_worker: runs the function in another process (`RewardWorkers.submit`); None: it runs here.
            ended: once it is set, no further try is made.

        Raises:
            RewardError: the last try failed, or what was returned is no reward.
        """

        def attempt() -> tuple[RewardCall, Any]:
            call, keywords = self._begin()
            if in_worker is not None:
                return call, in_worker(self.function, call, keywords, self.faults.timeout)
            return call, in_time(lambda: as_list(self.function(**keywords)), self.faults.timeout, "reward_timeout")

        try:
            call, rewards = Retrying(**self.faults.policy(self.name, ended))(attempt)
        except Exception as error:
            if ended is not None and ended.is_set():
                raise
            return self._fail(error)
        return self._end(call, rewards)

    async def score_later(self) -> ScoredChunk:
        """The rewards of an asynchronous function, and what it logged.

        Raises:
            RewardError: the last try failed, or what was returned is no reward.
        """

        async def attempt() -> tuple[RewardCall, Any]:
            call, keywords = self._begin()
            try:
                return call, await asyncio.wait_for(self.function(**keywords), self.faults.timeout)
            except asyncio.TimeoutError as error:
                if str(error):  # the function's own
                    raise
                raise CallTimeout(self.faults.timeout, "reward_timeout") from None

        try:
            scored: tuple[RewardCall, Any] = await AsyncRetrying(**self.faults.policy(self.name))(attempt)
        except Exception as error:
            return self._fail(error)
        return self._end(*scored)
