"""A reward function that fails, by itself: a process of `reward_workers` imports it by name, and nothing else."""

from typing import Any


def failing(completions: list[Any], **_: Any) -> list[float]:
    return [completions[0].score]
