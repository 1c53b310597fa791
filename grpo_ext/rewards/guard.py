"""One call of a reward function: bounded in time, retried and checked.

Differs from TRL: NaN, infinity and non-numbers are errors that name the function, the row and the value, instead of
silent zeros; `None` stays "does not apply"; a call that hangs or fails can be ended and retried. Used by
rewards.runner; rollouts bound tools and environments by `in_time`.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
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
ChunkRewards = tuple[list[float | None], RewardCall]  # the rewards of a call, and what it logged
Execute = Callable[["GuardedCall", RewardCall], Any]  # makes one attempt, which logs into the record


def _short(value: Any) -> str:
    return shortened(repr(value), 120)


def check_rewards(name: str, rewards: Any, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | None]:
    """The rewards as floats or `None`.

    Raises:
        RewardError: not a sequence, the wrong number of values, or a value that is not a finite number.
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
    """The number, or NaN for a value that is not a number."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
        return math.nan


class CallTimeout(TimeoutError):
    """A call that did not return within the time that a setting gives it."""

    remedy = (
        "a larger reward_timeout gives it more time, reward_retries makes the call again, and reward_on_failure='none' "
        "goes on without."
    )

    def __init__(self, seconds: float | None, setting: str) -> None:
        super().__init__(f"no answer within {setting}={seconds} seconds")


def in_time(function: Callable[[], Any], seconds: float | None, setting: str) -> Any:
    """What `function` returns, within a time limit; None: no limit.

    Raises:
        CallTimeout: it did not return. Its thread keeps running, because a thread cannot be stopped.
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
        if future.done():  # raised by the function
            raise
        raise CallTimeout(seconds, setting) from None


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


STRICT = Faults()


def execute_here(call: GuardedCall, record: RewardCall) -> Any:
    """Call a synchronous function in this process."""
    keywords = {**call.keywords, **call.recorders_of(record)}
    return in_time(lambda: as_list(call.function(**keywords)), call.faults.timeout, "reward_timeout")


@dataclass(frozen=True)
class GuardedCall:
    """A call of a reward function for one chunk of completions.

    Attributes:
        function: the reward function.
        record: an empty record of the call. Each attempt logs into a copy, so a failed attempt logs nothing.
        keywords: of the call, without recorders.
        recorders: the user's overrides of `log_metric` and `log_extra`; missing ones log into the record.
        faults: how a call that hangs or raises is handled.
    """

    function: Callable[..., Any]
    record: RewardCall
    keywords: dict[str, Any]
    recorders: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    faults: Faults = STRICT

    def run(self, execute: Execute = execute_here, ended: threading.Event | None = None) -> ChunkRewards:
        """The rewards of a synchronous function, and what it logged.

        Args:
            execute: calls the function, here or in another process.
            ended: once it is set, no further attempt is made.

        Raises:
            RewardError: the last attempt failed, or it returned something that is not a reward.
            ConfigError: the function cannot be loaded in the other process; no attempt would succeed.
        """
        ended = ended or threading.Event()
        try:
            for attempt in Retrying(sleep=sleep_using_event(ended), **self._retry_policy(ended)):
                with attempt:
                    record = self._empty_record()
                    rewards = execute(self, record)
        except ConfigError as error:
            raise ConfigError(f"reward function '{self.record.function}' {error}") from error
        except Exception as error:
            if ended.is_set():
                raise
            return self._failed(error)
        return self._checked(rewards, record)

    async def run_async(self) -> ChunkRewards:
        """As `run`, for an asynchronous function, on the running loop."""
        try:
            async for attempt in AsyncRetrying(**self._retry_policy(threading.Event())):
                with attempt:
                    record = self._empty_record()
                    rewards = await self._execute_async(record)
        except Exception as error:
            return self._failed(error)
        return self._checked(rewards, record)

    async def _execute_async(self, record: RewardCall) -> Any:
        answer = self.function(**self.keywords, **self.recorders_of(record))
        try:
            return await asyncio.wait_for(answer, self.faults.timeout)
        except asyncio.TimeoutError as error:
            if str(error):  # raised by the function
                raise
            raise CallTimeout(self.faults.timeout, "reward_timeout") from None

    def recorders_of(self, record: RewardCall) -> dict[str, Callable[..., None]]:
        """The `log_metric` and `log_extra` of an attempt."""
        return {"log_metric": record.log_metric, "log_extra": record.log_extra, **self.recorders}

    def _empty_record(self) -> RewardCall:
        return dataclasses.replace(self.record, metrics=[], columns={})

    def _retry_policy(self, ended: threading.Event) -> dict[str, Any]:
        """Arguments of tenacity's retry loops."""
        attempts = self.faults.retries + 1

        def warn(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            logger.warning(f"{self._failure(error)}; try {state.attempt_number + 1} of {attempts} follows.")

        return {
            "stop": stop_after_attempt(attempts) | stop_when_event_set(ended),
            "wait": wait_exponential(multiplier=0.5, max=30),
            "retry": retry_if_exception(lambda e: isinstance(e, Exception) and not isinstance(e, ConfigError)),
            "before_sleep": warn,
            "reraise": True,
        }

    def _checked(self, rewards: Any, record: RewardCall) -> ChunkRewards:
        prompts, completions = self.keywords["prompts"], self.keywords["completions"]
        return check_rewards(self.record.function, rewards, prompts, completions), record

    def _failure(self, error: BaseException | None) -> str:
        return f"reward function '{self.record.function}' failed ({_described(error)})"

    def _failed(self, error: Exception) -> ChunkRewards:
        """The result after the last attempt: an error, or no rewards, as `faults.on_failure` says."""
        if self.faults.on_failure != "none":
            raise _reward_error(self.record.function, error) from error
        rows = self.record.rows
        logger.warning(f"{self._failure(error)}; its {rows} completions get None from it (reward_on_failure='none').")
        return [None] * rows, self._empty_record()


def _described(error: BaseException | None) -> str:
    return str(error) if isinstance(error, RemoteError) else f"{type(error).__name__}: {error}"


def _reward_error(name: str, error: Exception) -> RewardError:
    described = _described(error)
    remedy = "make it return None for completions it cannot score, and see the traceback above for where it failed."
    if described.startswith("TypeError") and "argument" in described:
        remedy = (
            "it is called with prompts, completions, completion_ids and every column of the data by name: let it take "
            "**kwargs, and ask only for columns the data has."
        )
    return RewardError(f"reward function '{name}' raised {described}; {getattr(error, 'remedy', remedy)}")
