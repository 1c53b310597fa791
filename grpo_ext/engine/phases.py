"""Where the time and the tokens of a step go, for the logs.

Differs from TRL's `step_time`: seconds by phase, and how much of what the model computed was needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from ..core.micro_batches import StepSizes
from .window import MicroBatch, StepMeter


class PhaseClock(TrainerCallback):
    """Adds up the seconds of the phases of a step on this process: rollout, logps, window, optimizer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str | None) -> Iterator[None]:
        """Count what runs inside for a phase; None counts nothing."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if name is not None:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The gradient is clipped and the optimizer starts."""
        self._start = time.perf_counter()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer is done; shown with the next step."""
        self.seconds["optimizer"] = time.perf_counter() - self._start

    def take(self) -> dict[str, float]:
        """The seconds so far, by phase; starts again at zero."""
        taken, self.seconds = self.seconds, {}
        return taken


@dataclass(frozen=True)
class StepWork:
    """Tokens of a step.

    Attributes:
        useful: unique tokens of the whole step: each prompt once, each completion, of those that are run.
        computed: tokens that this process's forwards hold.
        padding: those among them that are padding.
    """

    useful: int
    computed: int
    padding: int

    @classmethod
    def of(cls, sizes: StepSizes, rows: Sequence[int], parts: Sequence[MicroBatch], packed: bool) -> StepWork:
        """Count a plan: `rows` are those of the whole step that are run, `parts` this process's micro-batches."""
        held = [(part.rows, sizes.tokens(part.rows, packed)) for part in parts if part.weight]
        real = sum(sizes.tokens([row], packed=True) for own, _ in held for row in own)
        computed = sum(tokens for _, tokens in held)
        return cls(sizes.tokens(rows, packed=True), computed, 0 if packed else computed - real)

    def add_to(self, meter: StepMeter) -> None:
        """Meter this process's part."""
        for name in ("computed", "padding"):
            meter.add_number(f"layout/{name}", getattr(self, name))

    def shares(self, values: dict[str, float], seconds: float) -> dict[str, float]:
        """What is logged, from the reduced values (taken out of `values`) and this process's seconds in the window."""
        computed, padding = values.pop("layout/computed"), values.pop("layout/padding")
        spare = max(computed - padding - self.useful, 0.0)
        return {
            "layout/padding_share": padding / max(computed, 1.0),
            "layout/duplicate_share": spare / max(computed, 1.0),
            "layout/useful_tokens_per_second": self.useful / max(seconds, 1e-9),
        }
