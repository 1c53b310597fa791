"""Calls of reward functions, bounded in time, tried again and checked.

Differs from TRL: NaN, infinity and non-numbers are errors that name the function, the row and the value, instead of
silent zeros; `None` stays "does not apply"; a call that hangs or fails can be ended and made again. Used by
rewards.runner.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.logging import get_logger
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_exponential,
)

from ..errors import ConfigError, RewardError, shortened
from .calls import RewardCall
from .worker import RemoteError, as_list

logger = get_logger(__name__)
_LARGEST = torch.finfo(torch.float32).max
ScoredChunk = tuple[list[float | None], RewardCall]  # the rewards of a call, and what it logged
# calls a function with keywords and a limit in seconds; the second argument is the record of the call
Execute = Callable[[Callable[..., Any], RewardCall, dict[str, Any], float | None], Any]


def _short(value: Any) -> str:
    return shortened(repr(value), 120)


def check_rewards(name: str, rewards: Any, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | None]:
    """The rewards as floats or `None`.

    Raises:
        RewardError: not a sequence, the wrong number of values, or a value that is no finite number.
    """
    try:
        values = list(rewards)
    except TypeError:
        raise RewardError(
            f"reward function '{name}' returned {_short(rewards)}, which is no list; return one number or None for"
            f" each of the {len(completions)} completions."
        ) from None
    if len(values) != len(completions):
        raise RewardError(
            f"reward function '{name}' returned {len(values)} rewards for {len(completions)} completions; return one "
            "number or None for each."
        )
    numbers = [None if value is None else _as_float(value) for value in values]
    for row, number in enumerate(numbers):
        if number is not None and not abs(number) <= _LARGEST:  # NaN compares false
            raise RewardError(
                f"reward function '{name}' returned {_short(values[row])} in row {row} (prompt {_short(prompts[row])}, "
                f"completion {_short(completions[row])}); a reward is a finite number, or None where the function does "
                "not apply."
            )
    return numbers


def _as_float(value: Any) -> float:
    """The number, or NaN for a value that is no number."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
        return math.nan


def _described(error: BaseException | None) -> str:
    return f"{error.kind if isinstance(error, RemoteError) else type(error).__name__}: {error}"


def _reward_error(name: str, error: Exception) -> RewardError:
    remedy = "make it return None for completions it cannot score, and see the traceback above for where it failed."
    if _described(error).startswith("TypeError") and "argument" in str(error):
        remedy = (
            "it is called with prompts, completions, completion_ids and every column of the data by name: let it take "
            "**kwargs, and ask only for columns the data has."
        )
    remedy = getattr(error, "remedy", remedy)
    return RewardError(f"reward function '{name}' raised {_described(error)}; {remedy}")


@dataclass(frozen=True)
class Faults:
    """How a reward function that hangs or raises is handled.

    Attributes:
        timeout: seconds a call may take; None: any time.
        retries: retries after a call that failed.
        on_failure: after the last one: "error", or "none" for `None` as the reward of every completion of the call.
    """

    timeout: float | None = None
    retries: int = 0
    on_failure: str = "error"

    def policy(self, name: str, ended: threading.Event) -> dict[str, Any]:
        """Arguments of tenacity's retry loops; once `ended` is set, no further attempt is made."""

        def warn(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            logger.warning(
                f"reward function '{name}' failed ({_described(error)}); try {state.attempt_number + 1} of "
                f"{self.retries + 1} follows."
            )

        return {
            "stop": stop_after_attempt(self.retries + 1) | stop_when_event_set(ended),
            "wait": wait_exponential(multiplier=0.5, max=30),
            "retry": retry_if_exception(lambda e: isinstance(e, Exception) and not isinstance(e, ConfigError)),
            "before_sleep": warn,
            "reraise": True,
        }


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
    future: Future[Any] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:  # of any kind; the calling thread raises it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name=setting).start()
    try:
        return future.result(seconds)
    except FutureTimeout:
        if future.done():  # the function's own
            raise
        raise CallTimeout(seconds, setting) from None


def execute_here(function: Callable[..., Any], _: RewardCall, keywords: dict[str, Any], seconds: float | None) -> Any:
    """Call a synchronous function in this process (`Execute`)."""
    return in_time(lambda: as_list(function(**keywords)), seconds, "reward_timeout")


@dataclass(frozen=True)
class GuardedCall:
    """A call of a reward function for one chunk of completions.

    Attributes:
        function, name, number: the function, its name, its place among the reward functions.
        first: place of the chunk's first completion in the rollout batch, over all processes.
        keywords: of the call, without recorders.
        recorders: the user's own `log_metric` and `log_extra`; missing ones record in the `RewardCall`.
        faults: how a call that hangs or raises is handled.
    """

    function: Callable[..., Any]
    name: str
    number: int
    first: int
    keywords: dict[str, Any]
    recorders: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    faults: Faults = STRICT

    def score(self, execute: Execute = execute_here, ended: threading.Event | None = None) -> ScoredChunk:
        """The rewards of a synchronous function, and what it logged in the attempt that succeeded.

        Args:
            execute: calls the function, here or in another process.
            ended: once it is set, the function is not called again.

        Raises:
            RewardError: the last attempt failed, or what was returned is no reward.
            ConfigError: the function cannot be loaded in the other process; no attempt would succeed.
        """
        ended = ended or threading.Event()

        def attempt() -> tuple[Any, RewardCall]:
            record = self._record()
            return execute(self.function, record, self._keywords(record), self.faults.timeout), record

        try:
            retrying = Retrying(sleep=sleep_using_event(ended), **self.faults.policy(self.name, ended))
            rewards, record = retrying(attempt)
        except ConfigError as error:
            raise ConfigError(f"reward function '{self.name}' {error}") from error
        except Exception as error:
            if ended.is_set():
                raise
            return self._failed(error)
        return self._checked(rewards, record)

    async def score_later(self) -> ScoredChunk:
        """As `score`, of an asynchronous function, on the running loop."""

        async def attempt() -> tuple[Any, RewardCall]:
            record = self._record()
            try:
                rewards = await asyncio.wait_for(self.function(**self._keywords(record)), self.faults.timeout)
            except asyncio.TimeoutError as error:
                if str(error):  # the function's own
                    raise
                raise CallTimeout(self.faults.timeout, "reward_timeout") from None
            return rewards, record

        try:
            retrying = AsyncRetrying(**self.faults.policy(self.name, threading.Event()))
            result: tuple[Any, RewardCall] = await retrying(attempt)
        except Exception as error:
            return self._failed(error)
        return self._checked(*result)

    def _record(self) -> RewardCall:
        """A record for one attempt, so that what a failed one logged does not count."""
        return RewardCall(self.name, self.number, self.first, len(self.keywords["completions"]))

    def _keywords(self, record: RewardCall) -> dict[str, Any]:
        return {**self.keywords, "log_metric": record.log_metric, "log_extra": record.log_extra, **self.recorders}

    def _checked(self, rewards: Any, record: RewardCall) -> ScoredChunk:
        return check_rewards(self.name, rewards, self.keywords["prompts"], self.keywords["completions"]), record

    def _failed(self, error: Exception) -> ScoredChunk:
        """The result of a call that failed for good: an error, or no rewards, as the faults say."""
        if self.faults.on_failure != "none":
            raise _reward_error(self.name, error) from error
        completions = self.keywords["completions"]
        logger.warning(
            f"reward function '{self.name}' failed ({_described(error)}); its {len(completions)} completions get "
            "None from it (reward_on_failure='none')."
        )
        return [None] * len(completions), self._record()
