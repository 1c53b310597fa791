"""The plots of a report: which logged values go into which plot, and how it is drawn.

Differs from a tracker: one picture for each question about a GRPO run, and only of what was logged. `panels` gives the
numbers (tests compare them with the log), `draw` the picture; page.py puts both on the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...algorithms.pass_at_k import PASS
from ..plots import figure_class
from .runs import HELD_OUT, MEMORY, Run

COLOURS = ("#3566b8", "#d1622b", "#3f8f4f", "#a3417e", "#8a6d1d", "#4c9aa8", "#7a5cc0", "#777777")
LOG_SCALE = "fp16/loss_scale"

# title, unit, and the curves: names of logged values as regular expressions, with labels, in which \1 is the group.
# Where runs are compared, the first value that was logged stands for the plot.
_CLIPPED = {f"clip_ratio/({side})_mean": r"\1" for side in ("region", "low", "high")} | {"cispo_clip_ratio": "cispo"}
_EVALUATION = {"eval_reward": "reward", "eval_rewards/(.+)/mean": r"\1", r"eval_(.+_mean@\d+)": r"\1"}
_ACCURACY = {HELD_OUT: "held-out exact match", r"((?!rewards/|eval_rewards/).*accuracy.*)": r"\1"}
_SPEED = {"layout/useful_tokens_per_second": "useful tokens"}
PLOTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Evaluation: pass@k", "share of prompts", {f"eval_({PASS})": r"\1"}),
    ("Reward", "reward", {"reward": "reward", "rewards/(.+)/mean": r"\1"}),
    ("Evaluation", "reward", _EVALUATION),
    ("Accuracy", "share", _ACCURACY),
    ("Completion length", "tokens", {"completions/(mean|min|max)_length": r"\1"}),
    ("Completions cut at the longest length", "share", {"completions/clipped_ratio": "cut"}),
    ("Tool calls", "calls per completion", {"tools/call_frequency": "calls"}),
    ("Tool calls that failed", "share", {"tools/failure_frequency": "failed"}),
    ("Entropy", "nats per token", {"entropy": "entropy"}),
    ("Tokens whose ratio is clipped", "share", _CLIPPED),
    ("KL to the reference", "nats per token", {"kl": "kl"}),
    ("Groups without variance", "share", {"frac_reward_zero_std": "no variance"}),
    ("Dynamic sampling", "groups", {"dynamic_sampling/(replaced_groups)": r"\1", "dynamic_sampling/(.+)": r"\1"}),
    ("Time per phase", "seconds per step", {"step_time": "step", "time/(.+)": r"\1"}),
    ("Useful tokens per second of the optimizer step", "tokens/s", _SPEED),
    ("Peak memory of the main process", "MiB", {MEMORY: "peak"}),
    ("Loss scale (fp16)", "scale", {LOG_SCALE: "loss scale"}),
    ("Overflows (fp16)", "count", {"fp16/(?!loss_scale$)(.+)": r"\1"}),
    ("Gradient norm", "norm", {"grad_norm": "before clipping"}),
    ("Learning rate", "learning rate", {"learning_rate": "learning rate"}),
    ("Loss", "loss", {"loss": "loss"}),
)


@dataclass(frozen=True)
class Line:
    """One curve: values over steps, and the half width of a band around it where there is one."""

    label: str
    steps: list[int]
    values: list[float]
    band: list[float] | None = None


@dataclass(frozen=True)
class Panel:
    """One plot; `log`: with a logarithmic axis of values."""

    title: str
    unit: str
    lines: list[Line]
    log: bool = False
    identical: bool = False


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The plots of a run, of all that it logged; of several runs, one curve each. What never changes has no plot."""
    plots = []
    for title, unit, curves in PLOTS:
        logged = _logged(runs, curves)
        if not logged:
            continue
        name = next(iter(logged))
        if len(runs) == 1:
            lines = [Line(label, *runs[0].series(name), _band(runs[0], name)) for name, label in logged.items()]
        else:
            lines = [Line(run.name, *run.series(name)) for run in runs if name in run.names()]
            title = title if len(logged) == 1 else f"{title}: {logged[name]}"
        if len({value for line in lines for value in line.values}) > 1:
            same = len(runs) > 1 and all((one.steps, one.values) == (lines[0].steps, lines[0].values) for one in lines)
            plots.append(Panel(title, unit, lines, name == LOG_SCALE, same and len(lines) == len(runs)))
    return plots


def _logged(runs: Sequence[Run], curves: dict[str, str]) -> dict[str, str]:
    """The values that belong to a plot, with their labels, in the order of `curves`."""
    labels: dict[str, str] = {}
    names = dict.fromkeys(name for run in runs for name in run.names())
    for pattern, label in curves.items():
        for match in filter(None, (re.fullmatch(pattern, name) for name in names)):
            labels.setdefault(match.string, match.expand(label))
    return labels


def _band(run: Run, name: str) -> list[float] | None:
    """The standard deviation beside the reward, where each of its steps has one."""
    if name not in ("reward", "eval_reward"):
        return None
    steps, values = run.series(f"{name}_std")
    return values if steps == run.series(name)[0] else None


def draw(panel: Panel) -> bytes:
    """The plot as a PNG of about 700 by 330 pixels.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(6.4, 3.0), dpi=110, layout="constrained")
    axis = figure.subplots()
    for place, line in enumerate(panel.lines):
        _draw_curve(axis, line, place)
    if panel.log:
        axis.set_yscale("log", base=2)
    axis.set(xlabel="optimizer step", ylabel=panel.unit)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)
    if len(panel.lines) > 1:
        axis.legend(fontsize=8, framealpha=0.7, loc="upper left", bbox_to_anchor=(1, 1), handlelength=2.6)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _draw_curve(axis: Any, line: Line, place: int) -> None:
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
