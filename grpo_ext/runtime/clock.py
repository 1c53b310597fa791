"""Measures the phases of a step in seconds, for the logs, beside TRL's `step_time`."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transformers import TrainerCallback

from .attributes import temporarily_set


class PhaseClock(TrainerCallback):
    """Adds up the seconds of a process by phase: rollout, logps, rewards, train, optimizer; with a lag, waits too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter() - self.seconds[name]
        try:
            yield
        finally:  # a phase inside of itself counts once
            self.seconds[name] = time.perf_counter() - start

    def stopped(self) -> AbstractContextManager[None]:
        """Inside, nothing is counted: only phases of training are logged."""
        return temporarily_set(self, seconds=defaultdict(float))

    def add(self, seconds: dict[str, float]) -> None:
        for name, more in seconds.items():
            self.seconds[name] += more

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Add the seconds of the optimizer, which are shown with the next step."""
        self.seconds["optimizer"] = time.perf_counter() - self._start

    def pop_seconds(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, defaultdict(float)
        return seconds
