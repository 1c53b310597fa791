"""What `grpo-ext check` found out: the result of each split, and all of them as a table, sentences and JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from ..stock import OURS

IN_16_BITS = "16-bit rounding, or more: float32 would tell (docs/precision.md has what to expect)"
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
    """How a split compares with the reference split of the same trainer.

    Attributes:
        update_error: relative update error; NaN where there is none.
        gradient_error: the largest relative error of a step's gradient; NaN where there is none.
        metric_error: largest difference of a logged value, and its name.
        float64_error: the update error of the same split in float64, where that was needed to tell.
        verdict: "reference", "same", "same bits", "rounding", "differs", "nothing learned" or "refused".
        reason: what is to blame, where that can be known.
    """

    split: Split
    trainer: str
    update_error: float
    metric_error: float
    metric_name: str
    verdict: str
    reason: str = ""
    float64_error: float = math.nan
    gradient_error: float = math.nan

    def line(self, verdict: str | None = None) -> str:
        """The result in a line; `verdict` stands for one that is not final."""
        errors = {"gradient": self.gradient_error, "update": self.update_error, "float64": self.float64_error}
        known = [f"{name} {error:.1e}" for name, error in errors.items() if not math.isnan(error)]
        shown = f" ({', '.join(known)})" if known and self.verdict != "reference" else ""
        return f"{self.trainer}, {self.split}: {verdict or self.verdict}{shown}"


@dataclass
class CheckReport:
    """The comparison of all splits."""

    results: list[SplitResult]
    steps: int

    @property
    def ok(self) -> bool:
        """Whether no split of this package's trainer differs or was refused."""
        return all(r.verdict in _GOOD for r in self.results if r.trainer == OURS)

    def of(self, trainer: str) -> list[SplitResult]:
        """The results of one trainer."""
        return [r for r in self.results if r.trainer == trainer]

    def table(self) -> Table:
        """The report for people."""
        title = f"Relative errors against the first split: the gradient, and the update after {self.steps} steps"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("trainer", "proc.", "micro", "gradient", "update", "float64", "logs", "verdict"):
            words = name in ("trainer", "verdict")
            table.add_column(name, justify="left" if words else "right", no_wrap=words)
        for r in self.results:
            values = (r.gradient_error, r.update_error, r.float64_error, r.metric_error)
            errors = ("" if math.isnan(e) else f"{e:.1e}" for e in values)
            table.add_row(r.trainer, str(r.split.processes), str(r.split.micro_batch_size), *errors, r.verdict)
        return table

    def notes(self) -> list[str]:
        """Why splits differ or were refused: one sentence for each reason, with the splits it holds for."""
        grouped: dict[tuple[str, str], list[str]] = {}
        for r in self.results:
            if r.reason:
                grouped.setdefault((r.trainer, r.reason), []).append(str(r.split))
        return [f"{trainer} at {', '.join(where)}: {reason}." for (trainer, reason), where in grouped.items()]

    def conclusion(self, bitwise: bool) -> str:
        """What the comparison shows, in a sentence or two."""
        if not self.ok:
            if any(r.verdict == "nothing learned" for r in self.results):
                return "Nothing was learned to compare."
            reasons = [r.reason for r in self.of(OURS) if r.verdict not in _GOOD]
            if all(reason == IN_16_BITS for reason in reasons):
                return "Splits differ, by 16-bit rounding or more."
            return "At least one split learns something else."
        rounding = (
            "rounding: beyond the tolerance in float32, within it in float64. Adam moves an element whose gradient is "
            "rounding noise by a whole learning rate; a larger adam_epsilon damps it.\n"
        )
        reason = rounding if any(r.verdict == "rounding" for r in self.results) else ""
        return f"{reason}Every split of grpo_ext learns the same{', to the bit' if bitwise else ''}."

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no NaN."""
        results = [dataclasses.asdict(r) for r in self.results]
        plain = [{n: None if isinstance(v, float) and math.isnan(v) else v for n, v in r.items()} for r in results]
        return {"ok": self.ok, "steps": self.steps, "results": plain}


def print_report(report: CheckReport, bitwise: bool) -> None:
    """Print the table, the reasons and the conclusion."""
    console = Console()
    console.print(report.table())
    for note in report.notes():
        console.print(f"  {note}", highlight=False)
    console.print(report.conclusion(bitwise))


def duration(seconds: float) -> str:
    """Seconds as people say them: "12 s", "3 min", "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_progress(status: Status, sentence: str, seconds_left: float | None) -> None:
    """Print a sentence of a check with the time that is left; a terminal holds that in its status line, too."""
    left = "" if seconds_left is None else f"about {duration(seconds_left)} left"
    line = escape("; ".join(filter(None, (sentence, left))))
    status.console.print(f"[dim]{line}[/dim]", highlight=False, soft_wrap=True)
    status.update(left or "starting or ending processes")
