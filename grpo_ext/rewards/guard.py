"""One call of a reward function: bounded in time, retried, checked, and recorded with what it logs.

Differs from TRL: NaN, infinity and non-numbers are errors that name the function, the row and the value, instead of
silent zeros; `None` stays "does not apply"; a call that hangs or fails can be ended and retried. Used by
rewards.runner; rollouts bound tools and environments by `in_time`, and `join` gathers the records.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.logging import get_logger
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_exponential,
)

from ..errors import ConfigError, RewardError, shortened
from .worker import RemoteError, as_list

logger = get_logger(__name__)
_LARGEST = torch.finfo(torch.float32).max


class CallTimeout(TimeoutError):
    """A call that did not return within the time that a setting gives it."""

    remedy = (
        "a larger reward_timeout gives it more time, reward_retries makes the call again, and reward_on_failure='none' "
        "goes on without."
    )

    def __init__(self, seconds: float | None, setting: str) -> None:
        super().__init__(f"no answer within {setting}={seconds} seconds")


def start(function: Callable[[], Any]) -> Future[Any]:
    """Run a function on a thread of its own, in the context of this one."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # so that it cannot be cancelled, as a thread cannot be stopped
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:  # of any kind; the calling thread raises it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def result_in_time(future: Future[Any], seconds: float | None, setting: str) -> Any:
    """The result of a future; without one after `seconds` it is cancelled.

    Raises:
        CallTimeout: there is none. A thread keeps running, because a thread cannot be stopped.
    """
    try:
        return future.result(seconds)
    except FutureTimeout:
        if future.done():  # raised by the function
            raise
        future.cancel()
        raise CallTimeout(seconds, setting) from None


def in_time(function: Callable[[], Any], seconds: float | None, setting: str) -> Any:
    """What `function` returns, within a time limit, as `result_in_time`; None: no limit."""
    return function() if seconds is None else result_in_time(start(function), seconds, setting)


@dataclass
class RewardCall:
    """One call of a reward function, with what it logged by `log_metric` and `log_extra`.

    A call holds the same completions for every number of processes, so its metrics and columns are the same too.

    Attributes:
        function: its name.
        number: its place among the reward functions.
        first: place of the call's first completion in the rollout batch, over all processes.
        rows: completions of the call.
        metrics: names and values, in the order logged.
        columns: values by column, at best one for each completion of the call.
    """

    function: str
    number: int
    first: int
    rows: int
    metrics: list[tuple[str, float]] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def moved(self, places: int) -> RewardCall:
        """The same call, with its completions moved by `places` in the rollout batch."""
        return dataclasses.replace(self, first=self.first + places)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; the metric is the mean over all calls that logged it."""
        self.metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column of the completions table, one value for each completion of the call."""
        self.columns.setdefault(column, []).extend(values)


ChunkRewards = tuple[list[float | None], RewardCall]  # the rewards of a call, and what it logged
Execute = Callable[["GuardedCall", RewardCall], Any]  # makes one attempt, which logs into the record


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


def execute_here(call: GuardedCall, record: RewardCall) -> Any:
    """Call a synchronous function in this process."""
    keywords = {**call.keywords, **call.recorders_of(record)}
    return in_time(lambda: as_list(call.function(**keywords)), call.faults.timeout, "reward_timeout")


def execute_on(loop: asyncio.AbstractEventLoop, call: GuardedCall, record: RewardCall) -> Any:
    """Call an asynchronous function on a loop that another thread runs, and wait for it."""
    coroutine = call.function(**call.keywords, **call.recorders_of(record))
    return result_in_time(asyncio.run_coroutine_threadsafe(coroutine, loop), call.faults.timeout, "reward_timeout")


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
    recorders: Mapping[str, Callable[..., None]]
    faults: Faults

    def run(self, execute: Execute = execute_here, ended: threading.Event | None = None) -> ChunkRewards:
        """The rewards, and what the function logged.

        Args:
            execute: calls the function: here, on a loop or in another process.
            ended: once it is set, no further attempt is made.

        Raises:
            CancelledError: `ended` is set.
            RewardError: the last attempt failed, or it returned something that is not a reward.
            ConfigError: the function cannot be loaded in the other process.
        """
        ended = ended or threading.Event()
        retrying = Retrying(
            sleep=sleep_using_event(ended),
            stop=stop_after_attempt(self.faults.retries + 1) | stop_when_event_set(ended),
            wait=wait_exponential(multiplier=0.5, max=30),
            retry=retry_if_exception(lambda e: isinstance(e, Exception) and not isinstance(e, ConfigError)),
            before_sleep=self._warn,
            reraise=True,
        )
        try:
            if ended.is_set():  # before the first attempt
                raise CancelledError
            rewards, record = retrying(self._attempt, execute)
        except ConfigError:  # no attempt would succeed
            raise
        except Exception as error:
            if ended.is_set():
                raise CancelledError("the processes of reward_workers were ended") from error
            return self._failed(error)
        return self._checked(rewards), record

    def _attempt(self, execute: Execute) -> tuple[Any, RewardCall]:
        record = dataclasses.replace(self.record, metrics=[], columns={})
        return execute(self, record), record

    def recorders_of(self, record: RewardCall) -> dict[str, Callable[..., None]]:
        """The `log_metric` and `log_extra` of an attempt."""
        return {"log_metric": record.log_metric, "log_extra": record.log_extra, **self.recorders}

    def _failure(self, error: BaseException | None) -> str:
        return str(error) if isinstance(error, RemoteError) else f"{type(error).__name__}: {error}"

    def _warn(self, state: RetryCallState) -> None:
        failure = self._failure(None if state.outcome is None else state.outcome.exception())
        tries = f"try {state.attempt_number + 1} of {self.faults.retries + 1} follows"
        logger.warning(f"reward function '{self.record.function}' failed ({failure}); {tries}.")

    def _failed(self, error: Exception) -> ChunkRewards:
        """No rewards after the last attempt.

        Raises:
            RewardError: a failure is an error.
        """
        failure, name, rows = self._failure(error), f"reward function '{self.record.function}'", self.record.rows
        if self.faults.on_failure == "none":
            logger.warning(f"{name} failed ({failure}); its {rows} completions get None (reward_on_failure='none').")
            return [None] * rows, self.record
        remedy = "make it return None for completions it cannot score, and see the traceback above for where it failed."
        if failure.startswith("TypeError") and "argument" in failure:
            remedy = (
                "it is called with prompts, completions, completion_ids and every column of the data by name: let it "
                "take **kwargs, and ask only for columns the data has."
            )
        raise RewardError(f"{name} raised {failure}; {getattr(error, 'remedy', remedy)}") from error

    def _checked(self, rewards: Any) -> list[float | None]:
        """The rewards as floats or `None`.

        Raises:
            RewardError: not a sequence, the wrong number of values, or a value that is not a finite number.
        """
        returned = f"reward function '{self.record.function}' returned"
        remedy = f"return one number or None for each of the {self.record.rows} completions."
        try:
            values = list(rewards)
        except TypeError:
            raise RewardError(f"{returned} {_short(rewards)}, which is no list; {remedy}") from None
        if len(values) != self.record.rows:
            raise RewardError(f"{returned} {len(values)} rewards; {remedy}")
        numbers = [None if value is None else _as_float(value) for value in values]
        for row, number in enumerate(numbers):
            if number is not None and not abs(number) <= _LARGEST:  # NaN compares false
                prompt, completion = self.keywords["prompts"][row], self.keywords["completions"][row]
                raise RewardError(
                    f"{returned} {_short(values[row])} in row {row} (prompt {_short(prompt)}, completion "
                    f"{_short(completion)}); a reward is a finite number, or None where the function does not apply."
                )
        return numbers


def _short(value: Any) -> str:
    return shortened(repr(value), 120)


def _as_float(value: Any) -> float:
    """The number, or NaN for a value that is not a number."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
        return math.nan


def metrics_of(calls: Sequence[RewardCall]) -> dict[str, list[float]]:
    """The values of each metric, one for each time it was logged."""
    values: dict[str, list[float]] = {}
    for call in calls:
        for name, value in call.metrics:
            values.setdefault(name, []).append(value)
    return dict(sorted(values.items()))


def columns_of(calls: Sequence[RewardCall], rows: int) -> dict[str, list[Any]]:
    """Columns of the completions table with one entry for each of `rows` completions, None where none was logged.

    Where several functions log the same column, the last one counts.
    """
    table: dict[str, list[Any]] = {}
    for call in calls:
        for column, values in call.columns.items():
            if len(values) != call.rows:
                logger.warning_once(
                    f"reward function '{call.function}' logged {len(values)} value(s) in the column '{column}' for "
                    f"{call.rows} completions; log one for each. Missing values are None, surplus ones are left out."
                )
            values = values[: call.rows]
            table.setdefault(column, [None] * rows)[call.first : call.first + len(values)] = values
    return dict(sorted(table.items()))
