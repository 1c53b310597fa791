"""The results of `grpo-ext check`: one line per split and a conclusion, as text and as plain values."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ..stock import OURS

_GOOD = ("reference", "same", "same bits", "rounding")


@dataclass(frozen=True)
class Split:
    """A hardware split: completions per forward on one device, and processes."""

    micro_batch_size: int
    processes: int = 1

    def __str__(self) -> str:
        return f"{self.processes} x {self.micro_batch_size}"


@dataclass
class SplitResult:
    """How a split compares with the reference split of the same trainer; an error that was not measured is NaN."""

    split: Split
    trainer: str
    verdict: str = "refused"  # "reference", "same", "same bits", "rounding", "differs", "nothing learned" or "refused"
    reason: str = ""  # the cause, if it is known
    update_error: float = math.nan  # relative
    gradient_error: float = math.nan  # relative, of the first gradient
    metric_error: float = math.nan  # the largest difference of a logged value

    def __str__(self) -> str:
        """The result in one line."""
        errors = {"gradient": self.gradient_error, "update": self.update_error}
        known = [f"{name} {error:.1e}" for name, error in errors.items() if not math.isnan(error)]
        shown = f" ({', '.join(known)})" if known and self.verdict != "reference" else ""
        return f"{self.trainer}, {self.split}: {self.verdict}{shown}{self.reason and f': {self.reason}'}"


@dataclass
class CheckReport:
    """The results of all splits."""

    results: list[SplitResult]
    steps: int

    @property
    def ok(self) -> bool:
        """Whether all splits of this package's trainer learned the same."""
        return all(r.verdict in _GOOD for r in self.of(OURS))

    def of(self, trainer: str) -> list[SplitResult]:
        """The results of one trainer."""
        return [r for r in self.results if r.trainer == trainer]

    def conclusion(self) -> str:
        """The conclusion of the comparison, in a sentence or two."""
        ours = self.of(OURS)
        if not self.ok:
            if any(r.verdict == "nothing learned" for r in ours):
                return "Nothing was learned, so there is nothing to compare."
            return "At least one split learns something else."
        same = "Every split of grpo_ext learns the same"
        verdicts = {r.verdict for r in ours}
        if "rounding" in verdicts:
            return (
                "rounding: gradients agree within the run's precision (half precision: docs/precision.md says which "
                "micro-batches agree best). Adam moves an element whose gradient is rounding noise by a whole learning "
                f"rate; a larger adam_epsilon damps this.\n{same}, to rounding."
            )
        return f"{same}, to the bit." if "same bits" in verdicts else f"{same}."

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with None for NaN."""
        results = [dataclasses.asdict(r) for r in self.results]
        plain = [{n: None if isinstance(v, float) and math.isnan(v) else v for n, v in r.items()} for r in results]
        return {"ok": self.ok, "steps": self.steps, "results": plain}
