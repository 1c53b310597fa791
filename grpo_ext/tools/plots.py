"""Plots of what `grpo-ext check` and the demos measured, as files (png, svg or pdf).

The figures of the README are made with them. matplotlib is imported when a plot is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .stock import OURS, STOCK

if TYPE_CHECKING:
    from .check import CheckReport

_COLOURS = {STOCK: "tab:orange", OURS: "tab:blue"}
_NOTHING = 1e-8  # where an error of zero is drawn


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


def _save(figure: Any, axis: Any, path: Path) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def write_held_out_plot(runs: Sequence[Path], path: Path) -> None:
    """The held-out score of runs of a demo over the seconds they trained, without those of measuring.

    Raises:
        ConfigError: matplotlib is not installed, or a run is no demo that has ended.
    """
    figure = figure_class(path)(figsize=(5.0, 3.0))
    axis = figure.subplots()
    for run in runs:
        try:
            metrics = json.loads((run / "metrics.json").read_text())
            scores, seconds = metrics["exact_match_by_step"], metrics["seconds_by_step"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{run} holds no held-out scores ({error}); name runs of the demo that ended.") from error
        axis.plot([seconds[step] for step in scores], list(scores.values()), "o-", markersize=3, label=run.name)
    axis.set_xlabel("seconds of training", fontsize=8)
    axis.set_ylabel("held-out exact match", fontsize=8)
    axis.set_ylim(0, 1.02)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=7)
    _save(figure, axis, path)


def write_check_plot(report: CheckReport, tolerance: float, path: Path) -> None:
    """The update error of every split but the reference, on a logarithmic scale; refused splits are marked as such.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    splits = list(dict.fromkeys(r.split for r in report.results if r.verdict != "reference"))
    figure = figure_class(path)(figsize=(max(5.0, 0.55 * len(splits) + 1.5), 3.6))
    axis = figure.subplots()
    for trainer in (STOCK, OURS):
        label = "stock TRL" if trainer == STOCK else trainer
        compared = [r for r in report.of(trainer) if r.split in splits]
        drawn = [(splits.index(r.split), r.update_error) for r in compared if not math.isnan(r.update_error)]
        if drawn:
            x, y = zip(*((x, max(error, _NOTHING)) for x, error in drawn))
            marker = "o" if trainer == OURS else "s"
            axis.plot(x, y, marker, color=_COLOURS[trainer], label=label)
        refused = [splits.index(r.split) for r in compared if math.isnan(r.update_error)]
        if refused:
            axis.plot(refused, [2.0] * len(refused), "x", color=_COLOURS[trainer], label=f"{label}: refused")
    axis.axhline(tolerance, color="grey", linewidth=0.8, linestyle="--", label=f"tolerance {tolerance:g}")
    axis.set_yscale("log")
    axis.set_ylim(_NOTHING / 2, 5)
    axis.set_xticks(
        range(len(splits)), [f"{s.processes} x {s.micro_batch_size}" for s in splits], rotation=60, fontsize=7
    )
    axis.set_xlabel("processes x micro-batch size", fontsize=8)
    axis.set_ylabel(f"relative update error, {report.steps} steps", fontsize=8)
    axis.legend(fontsize=7, loc="center", bbox_to_anchor=(0.5, 0.6), ncols=2)
    _save(figure, axis, path)
