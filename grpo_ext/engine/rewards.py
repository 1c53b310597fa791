"""Reward functions, checked: what they return must be rewards, and an error names the function, the row, the value.

Differs from TRL: NaN, infinity and non-numbers are errors instead of silent zeros; `None` stays "does not apply".
Wraps the functions once, when the trainer is built; called by TRL's `_calculate_rewards`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from trl.trainer.utils import is_async_callable

from ..errors import RewardError

_LARGEST = torch.finfo(torch.float32).max


def _short(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


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
    if not isinstance(value, Real) or not -_LARGEST <= _as_float(value) <= _LARGEST:  # NaN compares false
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
    return RewardError(f"reward function '{name}' raised {type(error).__name__}: {error}; {remedy}")


def checked_reward(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` with its result checked; synchronous or asynchronous as it was."""
    if is_async_callable(function):

        @functools.wraps(function)
        async def checked_async(*, prompts: Any, completions: Any, **kwargs: Any) -> list[float | None]:
            try:
                rewards = await function(prompts=prompts, completions=completions, **kwargs)
            except Exception as error:
                raise _failed(name, error) from error
            return check_rewards(name, rewards, prompts, completions)

        return checked_async

    @functools.wraps(function)
    def checked(*, prompts: Any, completions: Any, **kwargs: Any) -> list[float | None]:
        try:
            rewards = function(prompts=prompts, completions=completions, **kwargs)
        except Exception as error:
            raise _failed(name, error) from error
        return check_rewards(name, rewards, prompts, completions)

    return checked


def check_reward_functions(functions: list[Any], names: list[str]) -> list[Any]:
    """Wrap the callables of a list; reward models (modules) are returned as they are."""
    return [f if isinstance(f, torch.nn.Module) else checked_reward(f, n) for f, n in zip(functions, names)]
