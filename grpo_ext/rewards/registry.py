"""Reward functions by name: TRL's, your own, those of plugins, and two new ones (number check, length penalty).

Unlike TRL's, the math rewards also take plain completions, and the gold answer from `answer` where a data set has no
`solution`. recipes/grpo.py calls `resolve_rewards`.
"""

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from importlib.metadata import entry_points
from typing import Any

from ..errors import ConfigError, DataError
from ..loading import load_named

RewardFunction = Callable[..., Sequence["float | None"]]

# A minus is a sign unless it follows a word, a digit or a closing bracket ("10-5" contains 10 and 5).
_NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)(?P<sign>(?<![)}])[-\u2212])?(?:\$(?P<inner>-)?)?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d])|\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2}\b)?|(?<![\w.])\.\d+)"
)
_BOXED = re.compile(r"\\boxed\s*\{")


def numbers_in(text: str) -> list[Decimal]:
    """The numbers in a text, in order; reads thousands commas, `$`, signs and LaTeX spacing."""
    for latex, plain in (("{,}", ","), (r"\,", ""), (r"\!", ""), (r"\$", "$")):
        text = text.replace(latex, plain)
    matches = _NUMBER.finditer(text)
    return [(-1 if m["sign"] or m["inner"] else 1) * Decimal(m["digits"].replace(",", "")) for m in matches]


def _answer_in(text: str) -> str:
    """The content of the last `\\boxed{...}`, with inner braces; without one the whole text."""
    *before, inside = _BOXED.split(text)
    depth = 1
    for end, character in enumerate(inside if before else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return inside[:end]
    return inside


def final_number(text: str) -> Decimal | None:
    """The final number of a text: the first after the last `####`, else the last in `\\boxed{}`, else the last."""
    if "####" in text and (marked := numbers_in(text.rsplit("####", 1)[1])):
        return marked[0]
    numbers = numbers_in(_answer_in(text))
    return numbers[-1] if numbers else None


def completion_text(completion: Any) -> str:
    """The text of a completion: a string, or the last of a list of messages."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _gold(reward: str, columns: dict[str, Any], *names: str) -> list[Any]:
    """The gold answer of each completion, from the first of these columns that has one, or None."""
    if golds := [columns[name] for name in names if columns.get(name) is not None]:
        return [next((gold for gold in row if gold is not None), None) for row in zip(*golds, strict=True)]
    raise DataError(
        f"The reward '{reward}' needs a gold answer, and the data has neither a column 'answer' nor 'solution'; "
        "name the one to use as answer_column."
    )


def exact_number(completions: list[Any], **columns: Any) -> list[float | None]:
    """1.0 where the final number of the completion equals that of the gold answer (`answer` or `solution`), else 0.0.

    A gold answer without a number gives None, which TRL leaves out of the mean.
    """
    golds = [final_number(str(gold)) for gold in _gold("exact_number", columns, "answer", "solution")]
    answers = [final_number(completion_text(completion)) for completion in completions]
    return [None if gold is None else float(answer == gold) for gold, answer in zip(golds, answers, strict=True)]


def _length_penalty(max_completion_length: int) -> RewardFunction:
    """A reward from 0 for an empty completion to -1 for one that uses the whole budget."""

    def length_penalty(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [-min(len(ids) / max_completion_length, 1.0) for ids in completion_ids]

    return length_penalty


def _adapted(function: RewardFunction, needs_gold: bool = False) -> RewardFunction:
    """TRL's function, for plain completions too, with the gold answer from `solution` or `answer`."""

    @functools.wraps(function)
    def reward(completions: list[Any], **columns: Any) -> Sequence[float | None]:
        messages = [[{"role": "assistant", "content": completion_text(c)}] for c in completions]
        if needs_gold:
            golds = _gold(function.__name__, columns, "solution", "answer")
            columns["solution"] = ["" if gold is None else str(gold) for gold in golds]  # "" gives None
        return function(completions=messages, **columns)

    return reward


# by short name: makes the reward function from `trl.rewards` and the budget in tokens
_BUILT_IN: dict[str, Callable[[Any, Any], RewardFunction]] = {
    "exact_number": lambda trl, budget: exact_number,
    "length_penalty": lambda trl, budget: _length_penalty(budget),
    "accuracy": lambda trl, budget: _adapted(trl.accuracy_reward, needs_gold=True),
    "reasoning_accuracy": lambda trl, budget: _adapted(trl.reasoning_accuracy_reward, needs_gold=True),
    "cosine": lambda trl, budget: _adapted(trl.get_cosine_scaled_reward(max_len=budget), needs_gold=True),
    "think_format": lambda trl, budget: _adapted(trl.think_format_reward),
    "repetition": lambda trl, budget: _adapted(trl.get_repetition_penalty_reward()),
    # punishes the last fifth of the budget, as in DAPO (4096 of 20480 tokens)
    "soft_overlong": lambda trl, budget: _adapted(
        trl.get_soft_overlong_punishment(max_completion_len=budget, soft_punish_cache=max(budget // 5, 1))
    ),
}
_MATH = ("accuracy", "reasoning_accuracy", "cosine")  # need math-verify
_BUDGETED = ("length_penalty", "cosine", "soft_overlong")
PLUGIN_GROUP = "grpo_ext.rewards"  # entry points: name -> `(completions, **columns) -> list of rewards`


def reward_names() -> list[str]:
    """The short names that `resolve_rewards` knows, including those of plugins."""
    return sorted({*_BUILT_IN, *entry_points(group=PLUGIN_GROUP).names})


def resolve_rewards(names: list[str], max_completion_length: int | None = None) -> list[RewardFunction]:
    """Reward functions by short name (`reward_names()`), `package.module.function`, or `path/to/file.py:function`.

    `["none"]`, for a run that has a teacher, gives no function. `max_completion_length` in tokens is the budget of
    `length_penalty`, `soft_overlong` and `cosine`.
    """
    if not names:
        raise ConfigError(f"GRPO needs at least one reward; use {_known()}, or none beside a teacher.")
    return [] if names == ["none"] else [_resolve(name, max_completion_length) for name in names]


def _known() -> str:
    return f"one of {', '.join(reward_names())}, package.module.function, or path/to/file.py:function"


def _resolve(name: str, budget: int | None) -> RewardFunction:
    plugins = {entry.value for entry in entry_points(group=PLUGIN_GROUP, name=name)}
    if len(offers := sorted(plugins) + ["grpo_ext"] * (name in _BUILT_IN)) > 1:
        raise ConfigError(
            f"The reward '{name}' is defined by {' and '.join(offers)}; use package.module.function, or uninstall the "
            "plugin."
        )
    if name in _MATH and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"The reward '{name}' needs math-verify, which is not installed; `pip install math-verify`, or use "
            "exact_number."
        )
    if name in _BUDGETED and (budget is None or budget < 1):
        raise ConfigError(
            f"The reward '{name}' depends on the completion budget, and max_completion_length={budget}; set it to 1 or "
            "more tokens."
        )
    if name in _BUILT_IN:
        from trl import rewards

        return _BUILT_IN[name](rewards, budget)
    if not plugins and "." not in name:
        raise ConfigError(f"There is no reward '{name}'; use {_known()}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return load_named(plugins.pop().replace(":", ".") if plugins else name, f"The reward '{name}'", Callable)
