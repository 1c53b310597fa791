"""matplotlib's Figure for the report and the bench, and the report's plots: which logged values each of them shows.

matplotlib is imported when a plot is asked for.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..algorithms.pass_at_k import PASS
from ..errors import ConfigError

Series = tuple[list[int], list[float]]  # optimizer steps, values
HELD_OUT = "held_out_exact_match"  # the demo's own measurement

# title, unit, and patterns of the names of the values in it
PLOTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Evaluation", "mean over prompts", (HELD_OUT, f"eval_{PASS}", "eval_reward")),
    ("Reward", "reward", ("reward", "rewards/.+/mean")),
    ("Completion length", "tokens", ("completions/(mean|min|max)_length",)),
    (
        "Cut completions, clipped tokens, groups without variance",
        "share",
        (*("completions/clipped_ratio", "clip_ratio/region_mean", "cispo_clip_ratio", "frac_reward_zero_std"),),
    ),
    ("Entropy, KL to the reference", "nats per token", ("entropy", "kl")),
    ("Gradient norm before clipping", "norm", ("grad_norm",)),
    ("Time by phase", "seconds per step", ("step_time", "time/.+")),
)


@dataclass(frozen=True)
class Plot:
    """Curves over optimizer steps, each with its label."""

    title: str
    unit: str
    curves: list[tuple[str, Series]]

    @property
    def identical(self) -> bool:
        """Whether all curves are the same to the last digit."""
        return all(series == self.curves[0][1] for _, series in self.curves)


def plots_of(runs: dict[str, dict[str, Series]]) -> list[Plot]:
    """The plots of a run, with everything it logged; of several runs, one curve each. What never changes has none.

    Args:
        runs: for each run by its name, everything that it logged by name.
    """
    plots = []
    logged = dict.fromkeys(name for series in runs.values() for name in series)
    for title, unit, patterns in PLOTS:
        names = [name for pattern in patterns for name in logged if re.fullmatch(pattern, name)]
        if len(runs) == 1:
            curves = [(name, series[name]) for series in runs.values() for name in names]
        else:  # the first value stands for the plot
            title = f"{title}: {names[0]}" if names else title
            curves = [(run, series[name]) for run, series in runs.items() for name in names[:1] if name in series]
        if len({value for _, (_, values) in curves for value in values}) > 1:
            plots.append(Plot(title, unit, curves))
    return plots


def draw(plot: Plot) -> bytes:
    """The plot as a PNG of about 700 by 330 pixels.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(6.4, 3.0), dpi=110, layout="constrained")
    axis = figure.subplots()
    for place, (label, (steps, values)) in enumerate(plot.curves):
        # dashes, shorter with each curve: those beneath are seen through the gaps
        style: Any = (0, (4 / place, 8 - 4 / place)) if place else "solid"
        text = label.replace("$", r"\$")  # not a formula
        axis.plot(steps, values, linestyle=style, marker="." if len(steps) <= 12 else None, label=text)
    axis.set(xlabel="optimizer step", ylabel=plot.unit)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def figure_class(path: Path | None = None) -> Any:
    """matplotlib's Figure: it opens no window, and leaves the caller's own plots alone.

    Args:
        path: a file that a figure is to be written to.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib; install it with `pip install 'grpo-ext[plot]'`.") from None
    if path is not None and path.suffix[1:] not in FigureCanvasBase.filetypes:
        raise ConfigError(f"{path} is no plot that can be written; end its name in .png, .svg or .pdf.")
    return Figure
