"""The figure of `make bench`: a bar for each trainer and shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_ext.tools.plots import figure_class

from .shapes import Result


def write_bench_plot(results: Sequence[Result], path: Path) -> None:
    """Seconds per step of both trainers on every shape, stacked by phase.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = figure_class(path)(figsize=(2.2 * len(results), 3.6))
    axes = figure.subplots(1, len(results), squeeze=False)
    trainers = list(results[0].seconds)
    phases = [p for p in results[0].seconds[trainers[0]] if any(r.seconds[who][p] for r in results for who in trainers)]
    for axis, r in zip(axes[0], results):
        for bar, who in enumerate(trainers):
            bottom = 0.0
            for number, phase in enumerate(phases):
                seconds = r.seconds[who][phase]
                axis.bar(bar, seconds, bottom=bottom, color=f"C{number}", label=phase if bar == 0 else None)
                bottom += seconds
        axis.set_xticks(range(len(trainers)), trainers, fontsize=8)
        axis.set_title(f"{r.shape.name}\n{r.speed_up:.1f}x", fontsize=8)
        axis.tick_params(axis="y", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("seconds per step", fontsize=8)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(phases), fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=120)
