"""The demo problems of recipes/grpo.py, by the name that `--demo` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, did_you_mean
from .chat_tasks import chat_settings, last_word_task, sums_task
from .task import DemoTask, demo_config_defaults, load_demo


@dataclass(frozen=True)
class Demo:
    """A problem with its model.

    Attributes:
        load: makes or downloads the model, once; takes another chat model in its place where `chat` is set.
        settings: keyword arguments of `grpo_ext.GRPOConfig`, known before anything is loaded.
        reward: the name of its reward function, as `--rewards` takes it.
    """

    load: Callable[..., DemoTask]
    settings: Callable[[], dict[str, Any]]
    reward: str
    chat: bool = True


DEMOS = {
    "letters": Demo(load_demo, demo_config_defaults, "grpo_ext.demo.task.sorted_letters_reward", chat=False),
    "sums": Demo(sums_task, chat_settings, "exact_number"),
    "last_word": Demo(last_word_task, chat_settings, "grpo_ext.demo.chat_tasks.last_word_reward"),
}


def demo_named(name: str) -> Demo:
    """The problem of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in DEMOS:
        hint = did_you_mean(name, list(DEMOS), f"the demos are {', '.join(DEMOS)}.")
        raise ConfigError(f"--demo {name} is unknown; {hint}")
    return DEMOS[name]
