"""The plots of a report: which logged values go into which plot, and how it is drawn.

Differs from a tracker: one picture for each question about a GRPO run, and only of what was logged. `panels` gives the
numbers (tests compare them with the log), `draw` the picture; page.py puts both on the page.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...algorithms.pass_at_k import PASS
from ..plots import figure_class
from .runs import HELD_OUT, MEMORY, Run, number

COLOURS = ("#3566b8", "#d1622b", "#3f8f4f", "#a3417e", "#8a6d1d", "#4c9aa8", "#7a5cc0", "#777777")


@dataclass(frozen=True)
class Line:
    """One curve: values over steps, and the half width of a band around it where there is one."""

    label: str
    steps: list[int]
    values: list[float]
    band: list[float] | None = None

    @property
    def words(self) -> str:
        """First and last value, and least and most where they are others."""
        first, last, low, high = self.values[0], self.values[-1], min(self.values), max(self.values)
        ends = f"{number(first)} at step {self.steps[0]}, {number(last)} at step {self.steps[-1]}"
        return ends if {low, high} <= {first, last} else f"{ends} (least {number(low)}, most {number(high)})"

    def gap(self, other: Line) -> float:
        """The largest difference at a step that both have; infinite where they share none."""
        values = dict(zip(self.steps, self.values))
        shared = (abs(values[step] - value) for step, value in zip(other.steps, other.values) if step in values)
        return max(shared, default=math.inf)


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        name: of the figure on the page.
        unit: of the values.
        runs: how many runs have a curve in it.
        log: a logarithmic axis of values.
    """

    name: str
    title: str
    unit: str
    lines: list[Line]
    runs: int = 1
    log: bool = False

    @property
    def still(self) -> bool:
        """Whether there is one value alone."""
        return len({value for line in self.lines for value in line.values}) == 1

    @property
    def difference(self) -> float:
        """The largest difference between two curves at a step that both have; infinite where there is none."""
        return max((a.gap(b) for a, b in itertools.combinations(self.lines, 2)), default=math.inf)

    @property
    def identical(self) -> bool:
        """Whether several runs have the same steps and values."""
        return self.runs > 1 and self.difference == 0.0 and len({tuple(line.steps) for line in self.lines}) == 1

    @property
    def caption(self) -> str:
        """The numbers of every curve in words, after how much those of several runs differ."""
        curves = "; ".join(f"{line.label}: {line.words}" for line in self.lines)
        if self.runs == 1 or self.difference == math.inf:
            return curves
        agree = f"differ by at most {number(self.difference)}" if self.difference else "are identical"
        return f"At the steps that the runs share they {agree}. {curves}"


@dataclass(frozen=True)
class Spec:
    """What a plot shows.

    Attributes:
        curves: a regular expression of names of logged values, and their label, in which `\\1` is the group of it.
        main: the value that stands for the plot where runs are compared; the first one that is logged if empty.
    """

    name: str
    title: str
    unit: str
    curves: Mapping[str, str] = field(default_factory=dict)
    main: str = ""
    log: bool = False

    def names(self, run: Run) -> dict[str, str]:
        """The values of a run that belong to this plot, with their labels."""
        labels: dict[str, str] = {}
        for pattern, label in self.curves.items():
            for name in run.names():
                if match := re.fullmatch(pattern, name):
                    labels.setdefault(name, match.expand(label))
        return labels


_LENGTHS = {
    f"completions/{k}_length": label for k, label in (("mean", "mean"), ("min", "shortest"), ("max", "longest"))
}
_SIDES = (("region", "both sides"), ("low", "low"), ("high", "high"))
_CLIPPED = {**{f"clip_ratio/{side}_mean": label for side, label in _SIDES}, "cispo_clip_ratio": "cispo"}
_REWARD = {"reward": "reward", "rewards/(.+)/mean": r"\1"}
_SPEED = {"layout/useful_tokens_per_second": "useful tokens"}
_ACCURACY = {HELD_OUT: "held-out exact match", r"((?!rewards/|eval_rewards/).*accuracy.*)": r"\1"}
_EVALUATION = {"eval_reward": "reward", "eval_rewards/(.+)/mean": r"\1", r"eval_(.+_mean@\d+)": r"\1"}
_SAMPLING = "dynamic_sampling/replaced_groups"
SPECS = (
    Spec("pass_at_k", "Evaluation: pass@k", "share of prompts", {f"eval_({PASS})": r"\1"}),
    Spec("reward", "Reward", "reward", _REWARD),
    Spec("evaluation", "Evaluation", "reward", _EVALUATION, main="eval_reward"),
    Spec("accuracy", "Accuracy", "share", _ACCURACY),
    Spec("length", "Completion length", "tokens", _LENGTHS),
    Spec("clipped", "Completions cut at the longest length", "share", {"completions/clipped_ratio": "cut"}),
    Spec("tool_calls", "Tool calls", "calls per completion", {"tools/call_frequency": "calls"}),
    Spec("tool_failures", "Tool calls that failed", "share", {"tools/failure_frequency": "failed"}),
    Spec("entropy", "Entropy", "nats per token", {"entropy": "entropy"}),
    Spec("clip_share", "Tokens whose ratio is clipped", "share", _CLIPPED),
    Spec("kl", "KL to the reference", "nats per token", {"kl": "kl"}),
    Spec("no_variance", "Groups without variance", "share", {"frac_reward_zero_std": "no variance"}),
    Spec("dynamic_sampling", "Dynamic sampling", "groups", {"dynamic_sampling/(.+)": r"\1"}, main=_SAMPLING),
    Spec("time", "Time per phase", "seconds per step", {"time/(.+)": r"\1"}, main="step_time"),
    Spec("tokens_per_second", "Useful tokens per second of the optimizer step", "tokens/s", _SPEED),
    Spec("memory", "Peak memory of the main process", "MiB", {MEMORY: "peak"}),
    Spec("loss_scale", "Loss scale (fp16)", "scale", {"fp16/loss_scale": "loss scale"}, log=True),
    Spec("overflows", "Overflows (fp16)", "count", {"fp16/(?!loss_scale$)(.+)": r"\1"}),
    Spec("grad_norm", "Gradient norm", "norm", {"grad_norm": "before clipping"}),
    Spec("learning_rate", "Learning rate", "learning rate", {"learning_rate": "learning rate"}),
    Spec("loss", "Loss", "loss", {"loss": "loss"}),
)


def panels(runs: Sequence[Run], names: Sequence[str]) -> list[Panel]:
    """The plots of a run, of all that it logged; of several runs, one curve each."""
    plots = []
    for spec in SPECS:
        title, lines = (spec.title, _lines(runs[0], spec)) if len(runs) == 1 else _compared(runs, names, spec)
        if lines:
            plots.append(Panel(spec.name, title, spec.unit, lines, len(runs), spec.log))
    return plots


def _lines(run: Run, spec: Spec) -> list[Line]:
    lines = [Line(label, *run.series(name), _band(run, name)) for name, label in spec.names(run).items()]
    if spec.name in ("reward", "evaluation") and len(lines) == 2 and lines[0].values == lines[1].values:
        return lines[:1]  # a single function with weight 1
    return lines


def _band(run: Run, name: str) -> list[float] | None:
    """The standard deviation beside the reward, where each of its steps has one."""
    if name not in ("reward", "eval_reward"):
        return None
    steps, values = run.series(f"{name}_std")
    return values if steps == run.series(name)[0] else None


def _compared(runs: Sequence[Run], names: Sequence[str], spec: Spec) -> tuple[str, list[Line]]:
    """The title with the value that is compared, and its curve in each run that logged it."""
    logged = {spec.main: spec.main} if spec.main else {n: label for run in runs for n, label in spec.names(run).items()}
    value, label = next(iter(logged.items()), ("", ""))
    lines = [Line(name, *run.series(value)) for run, name in zip(runs, names)]
    title = spec.title if len(logged) == 1 and not spec.main else f"{spec.title}: {label}"
    return title, [line for line in lines if line.values]


def draw(panel: Panel) -> bytes:
    """The plot as a PNG of about 700 by 330 pixels.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(6.4, 3.0), dpi=110, layout="constrained")
    axis = figure.subplots()
    for place, line in enumerate(panel.lines):
        _curve(axis, line, place)
    if panel.log:
        axis.set_yscale("log", base=2)
    if not any(value for line in panel.lines for value in line.values):
        axis.set_ylim(0, 1)  # nothing but zeros: no negative share
    axis.set(xlabel="optimizer step", ylabel=panel.unit)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)
    if len(panel.lines) > 1:
        axis.legend(fontsize=8, framealpha=0.7, loc="upper left", bbox_to_anchor=(1, 1), handlelength=2.6)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _curve(axis: Any, line: Line, place: int) -> None:
    label = line.label.lstrip("_") or line.label  # a leading underscore hides a curve from the legend
    look: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "linewidth": 1.4, "markersize": 3}
    if place:  # dashes, shorter with each curve: those beneath are seen through the gaps
        look |= {"linestyle": (0, (4 / place, 8 - 4 / place)), "linewidth": 2.0}
    if len(line.steps) == 1 or (len(line.steps) <= 12 and not place):
        look["marker"] = "o"
    # without matplotlib's formulas, which an unfinished one would fail in
    axis.plot(line.steps, line.values, label=label.replace("$", r"\$"), **look)
    if line.band is not None:  # one standard deviation
        low, high = zip(*((value - half, value + half) for value, half in zip(line.values, line.band)))
        axis.fill_between(line.steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
