"""One call of a reward function: bounded in time, retried, checked, and recorded with what it logs.

Differs from TRL: NaN, infinity and non-numbers are errors that name the function, the row and the value, instead of
silent zeros; `None` still means "does not apply"; a call that hangs or fails can be ended and retried.
"""

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import tenacity
import torch

from ..errors import ConfigError, RewardError, shortened
from ..runtime.collectives import on_all_processes
from ..runtime.messages import logger
from .worker import Attempt, RemoteError, RewardCall, call_function

_LARGEST = torch.finfo(torch.float32).max
ChunkRewards = tuple[list[float | None], RewardCall]  # the rewards of a call, and what it logged


class CallTimeout(TimeoutError):
    """A call that did not return within the time that a setting allows."""

    remedy = (
        "a larger reward_timeout gives it more time, reward_retries repeats it, and reward_on_failure='none' goes "
        "on without its rewards."
    )

    def __init__(self, seconds: float | None, setting: str) -> None:
        super().__init__(f"no answer within {setting}={seconds} seconds")


def start(function: Callable[[], Any]) -> Future[Any]:
    """Run a function on its own thread, in the context of this one."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # no longer cancellable, because a thread cannot be stopped
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:  # the calling thread raises it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def result_in_time(future: Future[Any], seconds: float | None, setting: str, ended: Future[Any] | None = None) -> Any:
    """The result of a future; after `seconds` a CallTimeout, and a CallCancelled once `ended` is done.

    A thread keeps running, because it cannot be stopped.
    """
    done, _ = wait([future] if ended is None else [future, ended], seconds, FIRST_COMPLETED)
    if future in done:
        return future.result()
    future.cancel()
    if done:
        raise CallCancelled("another call failed")
    raise CallTimeout(seconds, setting)


def in_time(function: Callable[[], Any], seconds: float | None, setting: str) -> Any:
    return function() if seconds is None else result_in_time(start(function), seconds, setting)


class CallCancelled(CancelledError):
    """A call that was ended together with all others."""


def _is_final(error: BaseException) -> bool:
    """Whether there is no further attempt: all processes end with this error, or the call cannot succeed."""
    return isinstance(error, (ConfigError, CallCancelled)) or on_all_processes(error)


@dataclass(frozen=True)
class Faults:
    timeout: float | None = None  # seconds a call may take; None: any time
    retries: int = 0  # after a call that failed
    on_failure: str = "error"  # after the last retry; "none": every completion of the call gets `None`


@dataclass(frozen=True)
class GuardedCall:
    function: Callable[..., Any]
    record: RewardCall  # empty: each attempt logs into a copy, so a failed attempt logs nothing
    keywords: dict[str, Any]  # without `log_metric` and `log_extra`
    faults: Faults

    def run_here(self) -> ChunkRewards:
        attempt = partial(call_function, self.function, self.keywords, self.record)
        return self.run(lambda: in_time(attempt, self.faults.timeout, "reward_timeout"))

    def run_on(self, loop: asyncio.AbstractEventLoop, ended: Future[Any]) -> ChunkRewards:
        """Call an asynchronous function on the loop of another thread, until `ended` is done; see `run`."""

        async def attempt() -> Attempt:
            coroutine, record = call_function(self.function, self.keywords, self.record)
            return await coroutine, record

        def once() -> Attempt:
            if ended.done():
                raise CallCancelled("another call failed")
            future = asyncio.run_coroutine_threadsafe(attempt(), loop)
            return result_in_time(future, self.faults.timeout, "reward_timeout", ended)

        return self.run(once, lambda seconds: wait([ended], seconds))

    def run(self, attempt: Callable[[], Attempt], sleep: Callable[[float], Any] = time.sleep) -> ChunkRewards:
        """The rewards, and what the function logged; `attempt` calls it once."""
        retrying = tenacity.Retrying(
            sleep=sleep,
            stop=tenacity.stop_after_attempt(self.faults.retries + 1),
            wait=tenacity.wait_exponential(multiplier=0.5, max=30),
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, Exception) and not _is_final(e)),
            before_sleep=self._warn,
            reraise=True,
        )
        try:
            rewards, record = retrying(attempt)
        except Exception as error:
            if _is_final(error):
                raise
            return self._failed(error)
        return self._checked(rewards), record

    def _warn(self, state: tenacity.RetryCallState) -> None:
        failure = _text(state.outcome.exception() if state.outcome else None)
        tries = f"try {state.attempt_number + 1} of {self.faults.retries + 1} follows"
        logger.warning(f"reward function '{self.record.function}' failed ({failure}); {tries}.")

    def _failed(self, error: Exception) -> ChunkRewards:
        failure, name, rows = _text(error), f"reward function '{self.record.function}'", self.record.rows
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
        returned = f"reward function '{self.record.function}' returned"
        remedy = f"return one number or None for each of the {self.record.rows} completions."
        try:
            values = list(rewards)
        except TypeError:
            raise RewardError(f"{returned} {_short(rewards)}, which is not a list; {remedy}") from None
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


def _text(error: BaseException | None) -> str:
    return str(error) if isinstance(error, RemoteError) else f"{type(error).__name__}: {error}"


def _short(value: Any) -> str:
    return shortened(repr(value), 120)


def _as_float(value: Any) -> float:
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
        return math.nan


def metrics_of(calls: Sequence[RewardCall]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for call in calls:
        for name, value in call.metrics:
            values.setdefault(name, []).append(value)
    return dict(sorted(values.items()))


def columns_of(calls: Sequence[RewardCall], rows: int) -> dict[str, list[Any]]:
    """Columns of the completions table, with an entry for each of `rows` completions; None where nothing was logged.

    Where several functions log one column, the last one counts.
    """
    table: dict[str, list[Any]] = {}
    for call in calls:
        for column, values in call.columns.items():
            if len(values) != call.rows:
                logger.warning_once(
                    f"reward function '{call.function}' does not log one value for each completion in the column "
                    f"'{column}'. Missing values become None, extra ones are dropped."
                )
            values = values[: call.rows]
            table.setdefault(column, [None] * rows)[call.first : call.first + len(values)] = values
    return dict(sorted(table.items()))
