"""Reward functions by name: TRL's, those of plugins, yours, and two that TRL lacks (number check, length penalty).

Unlike TRL's, the math rewards take plain completions too, and the gold answer from `answer` where a data set has no
`solution`. recipes/grpo.py calls `resolve_rewards`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, DataError

FILE_MODULE_PREFIX = "grpo_ext_reward_"  # names of modules that are loaded from a file

RewardFunction = Callable[..., Sequence["float | None"]]

# A minus is a sign unless it stands after a word, a digit or a closing bracket ("10-5" holds 10 and 5).
_NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)(?P<sign>(?<![)}])[-\u2212])?(?:\$(?P<inner>-)?)?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d])|\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2}\b)?|(?<![\w.])\.\d+)"
)
_BOXED = re.compile(r"\\boxed\s*\{")


def numbers_in(text: str) -> list[Decimal]:
    """The numbers in a text, in order; reads thousands commas, `$`, signs and LaTeX spacing."""
    for latex, plain in (("{,}", ","), (r"\,", ""), (r"\!", ""), (r"\$", "$")):
        text = text.replace(latex, plain)
    numbers = []
    for match in _NUMBER.finditer(text):
        value = Decimal(match["digits"].replace(",", ""))
        numbers.append(-value if match["sign"] or match["inner"] else value)
    return numbers


def _last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, inner braces included."""
    starts = list(_BOXED.finditer(text))
    if not starts:
        return None
    begin, depth = starts[-1].end(), 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return text[begin:]


def final_number(text: str) -> Decimal | None:
    """The final number of a text: the first after the last `####`, else the last in `\\boxed{}`, else the last."""
    if "####" in text:
        marked = numbers_in(text.rsplit("####", 1)[1])
        if marked:
            return marked[0]
    boxed = _last_boxed(text)
    numbers = numbers_in(text if boxed is None else boxed)
    return numbers[-1] if numbers else None


def completion_text(completion: Any) -> str:
    """The text of a completion, which is a string, or a list of messages of which the last counts."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _gold(reward: str, columns: dict[str, Any]) -> list[Any]:
    for column in ("answer", "solution"):
        if columns.get(column) is not None:
            return columns[column]
    raise DataError(
        f"The reward '{reward}' needs a gold answer, and the data has neither a column 'answer' nor 'solution'; "
        "name the one to use as answer_column."
    )


def exact_number(completions: list[Any], **columns: Any) -> list[float | None]:
    """1.0 where the final number of the completion equals that of the gold answer, else 0.0.

    Args:
        completions: (B,) strings or lists of messages.
        columns: the gold in `answer` or `solution`: strings or numbers. A gold without a number gives None, which TRL
            leaves out of the mean.

    Raises:
        DataError: neither column is there.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, _gold("exact_number", columns)):
        wanted = final_number(str(gold))
        rewards.append(None if wanted is None else float(final_number(completion_text(completion)) == wanted))
    return rewards


def _length_penalty(max_completion_length: int) -> RewardFunction:
    """A reward from 0 for an empty completion to -1 for one that uses the whole budget."""

    def length_penalty(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [-min(len(ids) / max_completion_length, 1.0) for ids in completion_ids]

    return length_penalty


def _adapted(function: RewardFunction, needs_gold: bool) -> RewardFunction:
    """A reward function of TRL, for plain completions too, and with the gold answer in `answer` or `solution`."""

    @functools.wraps(function)
    def reward(completions: list[Any], **columns: Any) -> Sequence[float | None]:
        messages = [[{"role": "assistant", "content": completion_text(c)}] for c in completions]
        if needs_gold:
            gold = columns.get("solution")
            columns["solution"] = [str(g) for g in (gold if gold is not None else _gold(function.__name__, columns))]
        return function(completions=messages, **columns)

    return reward


_FROM_TRL = {  # short names of TRL's functions, and of functions that make one
    "accuracy": "accuracy_reward",
    "reasoning_accuracy": "reasoning_accuracy_reward",
    "cosine": "get_cosine_scaled_reward",
    "think_format": "think_format_reward",
    "repetition": "get_repetition_penalty_reward",
    "soft_overlong": "get_soft_overlong_punishment",
}
_MATH = ("accuracy", "reasoning_accuracy", "cosine")  # need math-verify, and a gold answer
_BUILT_IN = {"exact_number", "length_penalty", *_FROM_TRL}
PLUGIN_GROUP = "grpo_ext.rewards"  # entry points: name -> `(completions, **columns) -> list of rewards`


def reward_names() -> list[str]:
    """The short names that `resolve_rewards` knows, those of plugins included."""
    return sorted({*_BUILT_IN, *entry_points(group=PLUGIN_GROUP).names})


def resolve_rewards(names: list[str], max_completion_length: int | None = None) -> list[RewardFunction]:
    """Reward functions by short name (`reward_names()`), `package.module.function`, or `path/to/file.py:function`.

    Plugins add short names: entry points of the group `grpo_ext.rewards`.

    Args:
        names: in the order of `reward_weights`.
        max_completion_length: tokens; what `length_penalty`, `soft_overlong` and `cosine` measure against.

    Raises:
        ConfigError: no such name, module, file or function; math-verify missing; a budget needed and not given; a
            plugin that cannot be imported, or has the name of another reward.
    """
    if not names:
        raise ConfigError(f"No reward was named, and GRPO needs at least one; use {_known()}.")
    return [_resolve(name, max_completion_length) for name in names]


def _known() -> str:
    return f"one of {', '.join(reward_names())}, package.module.function, or path/to/file.py:function"


def _resolve(name: str, budget: int | None) -> RewardFunction:
    plugins = {entry.value for entry in entry_points(group=PLUGIN_GROUP, name=name)}
    if len(offers := sorted(plugins) + ["grpo_ext"] * (name in _BUILT_IN)) > 1:
        raise ConfigError(
            f"The reward '{name}' is offered by {' and '.join(offers)}; ask for package.module.function, or uninstall "
            "the plugin."
        )
    if name == "exact_number":
        return exact_number
    if name == "length_penalty":
        return _length_penalty(_budget(name, budget))
    if name in _FROM_TRL:
        return _from_trl(name, budget)
    if plugins or "." in name:
        return _load(plugins.pop().replace(":", ".") if plugins else name)
    raise ConfigError(f"There is no reward '{name}'; use {_known()}.")


def _budget(name: str, budget: int | None) -> int:
    if budget is None or budget < 1:
        raise ConfigError(
            f"The reward '{name}' measures against the completion budget, and max_completion_length={budget}; "
            "give max_completion_length, in tokens, 1 or more."
        )
    return budget


def _from_trl(name: str, budget: int | None) -> RewardFunction:
    from trl import rewards

    if name in _MATH and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"The reward '{name}' checks with math-verify, which is not installed; `pip install math-verify`, or use "
            "exact_number."
        )
    function = getattr(rewards, _FROM_TRL[name])
    if name == "cosine":
        function = function(max_len=_budget(name, budget))
    elif name == "repetition":
        function = function()
    elif name == "soft_overlong":
        tokens = _budget(name, budget)
        # the last fifth of the budget is punished, as in DAPO (4096 of 20480 tokens)
        function = function(max_completion_len=tokens, soft_punish_cache=max(tokens // 5, 1))
    return _adapted(function, needs_gold=name in _MATH)


def load_file(path: str | Path) -> ModuleType:
    """Import a Python file under a name of its own, so that what it defines can be pickled."""
    name = f"{FILE_MODULE_PREFIX}{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a file with this suffix always has a loader
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load(name: str) -> RewardFunction:
    """The function of `package.module.function` or `path/to/file.py:function`."""
    is_file = ".py:" in name
    source, _, function = name.rpartition(":" if is_file else ".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        path = Path(source).expanduser()
        module = load_file(path) if is_file else importlib.import_module(source)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ConfigError(f"The reward '{name}' cannot be loaded ({error}); use {_known()}.") from error
    value = getattr(module, function, None)
    if not callable(value):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"The reward '{name}' asks for '{function}', and the module has no function of that name; it has "
            f"{', '.join(sorted(functions)) or 'none'}."
        )
    return value
