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
from ...errors import ConfigError
from .runs import HELD_OUT, Run, number

MEMORY = "peak_memory_mib"  # of a log line, beside its values
_COLOURS = ("#3566b8", "#d1622b", "#3f8f4f", "#a3417e", "#8a6d1d", "#4c9aa8", "#7a5cc0", "#777777")


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
        name: of the file, without its ending.
        unit: of the values.
        kind: "line", "area" (stacked) or "log" (logarithmic values).
    """

    name: str
    title: str
    unit: str
    lines: list[Line]
    kind: str = "line"

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
        """Whether several curves have the same steps and values."""
        return self.difference == 0.0 and len({tuple(line.steps) for line in self.lines}) == 1

    @property
    def caption(self) -> str:
        """The numbers of every curve in words, and once of curves that are identical."""
        equal: dict[tuple[float, ...], list[Line]] = {}
        for line in self.lines:
            equal.setdefault((*line.steps, *line.values), []).append(line)
        return "; ".join(
            f"{', '.join(line.label for line in same)}: {'identical, ' if len(same) > 1 else ''}{same[0].words}"
            for same in equal.values()
        )


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
    kind: str = "line"
    main: str = ""

    def names(self, run: Run) -> dict[str, str]:
        """The values of a run that belong to this plot, with their labels."""
        found: dict[str, str] = {}
        for pattern, label in self.curves.items():
            for name in run.names():
                if match := re.fullmatch(pattern, name):
                    found.setdefault(name, match.expand(label))
        return found


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
    Spec("reward", "Reward (band: one standard deviation)", "reward", _REWARD),
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
    Spec("time", "Time per phase", "seconds per step", {"time/(.+)": r"\1"}, kind="area", main="step_time"),
    Spec("tokens_per_second", "Useful tokens per second of the optimizer step", "tokens/s", _SPEED),
    Spec("memory", "Peak memory of the main process", "MiB", main=MEMORY),
    Spec("loss_scale", "Loss scale (fp16)", "scale", {"fp16/loss_scale": "loss scale"}, kind="log"),
    Spec("overflows", "Overflows (fp16)", "count", {"fp16/(?!loss_scale$)(.+)": r"\1"}),
    Spec("grad_norm", "Gradient norm", "norm", {"grad_norm": "before clipping"}),
    Spec("learning_rate", "Learning rate", "learning rate", {"learning_rate": "learning rate"}),
    Spec("loss", "Loss", "loss", {"loss": "loss"}),
)


def panels(run: Run) -> list[Panel]:
    """The plots of one run, of what it logged."""
    found = []
    for spec in SPECS:
        lines = [_memory(run)] if spec.main == MEMORY else _lines(run, spec)
        lines = [line for line in lines if line.values]
        if lines:
            found.append(Panel(spec.name, spec.title, spec.unit, lines, spec.kind))
    return found


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


def _memory(run: Run, label: str | None = None) -> Line:
    rows = [(e["step"], e[MEMORY], e.get("memory_of")) for e in run.entries if isinstance(e.get(MEMORY), (int, float))]
    of = {"accelerator": "allocated on the accelerator"}.get(str(rows[-1][2]) if rows else "", "resident")
    return Line(label or of, [row[0] for row in rows], [float(row[1]) for row in rows])


def comparison_panels(runs: Sequence[Run], names: Sequence[str]) -> list[Panel]:
    """The plots of several runs, one curve each; a plot needs only one run that logged it."""
    found = []
    for spec in SPECS:
        lines = [_main(run, spec, name) for run, name in zip(runs, names)]
        lines = [line for line in lines if line.values]
        if lines:
            title = spec.title.removesuffix(" (band: one standard deviation)").replace("@k", "@1")
            named = [label for label in spec.curves.values() if "\\" not in label]
            detail = f", {named[0]}" if len(named) > 1 else ""
            title = "Time per step" if spec.name == "time" else title + detail
            found.append(Panel(spec.name, title, spec.unit, lines, "log" if spec.kind == "log" else "line"))
    return found


def _main(run: Run, spec: Spec, label: str) -> Line:
    if spec.main == MEMORY:
        return _memory(run, label)
    candidates = [spec.main] if spec.main else []
    candidates += [] if spec.kind == "area" else spec.names(run)  # a part of a stack does not stand for it
    found = (run.series(name) for name in candidates)
    return Line(label, *next((series for series in found if series[1]), ([], [])))


def draw(panel: Panel) -> bytes:
    """The plot as a PNG of about 700 by 330 pixels.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure_class, locator = plotting()
    figure = figure_class(figsize=(6.4, 3.0), dpi=110, layout="constrained")
    axis = figure.subplots()
    values = [value for line in panel.lines for value in line.values]
    near = 0.01 * (max(values) - min(values))
    if panel.kind == "area":
        _stack(axis, panel.lines)
    else:
        for i, line in enumerate(panel.lines):
            # curves within a hundredth of the plot's height would hide each other
            _curve(axis, line, _COLOURS[i % len(_COLOURS)], sum(line.gap(e) <= near for e in panel.lines[:i]))
    if panel.kind == "log":
        axis.set_yscale("log", base=2)
    if not any(values):
        axis.set_ylim(0, 1)  # nothing but zeros: no negative share
    axis.set(xlabel="optimizer step", ylabel=panel.unit)
    axis.xaxis.set_major_locator(locator(integer=True))
    axis.grid(alpha=0.25)
    if len(panel.lines) > 1:
        axis.legend(fontsize=8, framealpha=0.7, loc="upper left", bbox_to_anchor=(1, 1), handlelength=2.6)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _curve(axis: Any, line: Line, colour: str, beneath: int) -> None:
    marker = "o" if len(line.steps) <= 12 and not beneath else None
    label = line.label.lstrip("_") or line.label  # a leading underscore hides a curve from the legend
    # dashes, shorter the more lies beneath, through whose gaps every one of them is seen
    dashes = {"linestyle": (0, (4 / beneath, 8 - 4 / beneath))} if beneath else {}
    look = {"color": colour, "marker": marker, "markersize": 3, "linewidth": 2.0 if beneath else 1.4, **dashes}
    axis.plot(line.steps, line.values, label=_plain(label), **look)
    if line.band is not None:
        low = [value - half for value, half in zip(line.values, line.band)]
        high = [value + half for value, half in zip(line.values, line.band)]
        axis.fill_between(line.steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _stack(axis: Any, lines: Sequence[Line]) -> None:
    steps = sorted({step for line in lines for step in line.steps})
    values = [[dict(zip(line.steps, line.values)).get(step, 0.0) for step in steps] for line in lines]
    axis.stackplot(steps, values, labels=[_plain(line.label) for line in lines], colors=_COLOURS, alpha=0.85)


def _plain(label: str) -> str:
    """Without matplotlib's formulas, which an unfinished one would fail in."""
    return label.replace("$", r"\$")


def plotting() -> tuple[Any, Any]:
    """matplotlib's Figure and MaxNLocator; no window, and the caller's own plots are left alone.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ConfigError("the report needs matplotlib; install it with `pip install 'grpo-ext[plot]'`.") from None
    return Figure, MaxNLocator
