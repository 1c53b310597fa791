"""The README's figures.

`python -m tests.bench.figures check CHECK.json FILE` draws a file of `grpo-ext check --json`, and
`python -m tests.bench.figures held_out FILE RUN...` folders of demo runs that ended. `make conform` draws its own.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from grpo_ext.tools.check.comparison import Split
from grpo_ext.tools.stock import OURS, STOCK

_COLOURS = {STOCK: "tab:orange", OURS: "tab:blue"}
_NOTHING = 1e-8  # where an error of zero is drawn


def _save(figure: Any, axis: Any, path: Path) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def write_held_out_plot(runs: Sequence[Path], path: Path) -> None:
    """The held-out score of demo runs over their seconds of training, without those of measuring."""
    figure = Figure(figsize=(5.0, 3.0))
    axis = figure.subplots()
    for run in runs:
        metrics = json.loads((run / "metrics.json").read_text())
        scores, seconds = metrics["exact_match_by_step"], metrics["seconds_by_step"]
        axis.plot([seconds[step] for step in scores], list(scores.values()), "o-", markersize=3, label=run.name)
    axis.set_xlabel("seconds of training", fontsize=8)
    axis.set_ylabel("held-out exact match", fontsize=8)
    axis.set_ylim(0, 1.02)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=7)
    _save(figure, axis, path)


def write_check_plot(report: dict[str, Any], path: Path, tolerance: float = 1e-5) -> None:
    """The update error of every split but the reference, on a logarithmic scale; refused splits are marked as such."""

    def split_of(result: dict[str, Any]) -> str:
        return str(Split(**result["split"]))

    results = report["results"]
    splits = list(dict.fromkeys(split_of(r) for r in results if r["verdict"] != "reference"))
    figure = Figure(figsize=(max(5.0, 0.55 * len(splits) + 1.5), 3.6))
    axis = figure.subplots()
    for trainer in (STOCK, OURS):
        label = "stock TRL" if trainer == STOCK else trainer
        errors = {
            splits.index(split_of(r)): r["update_error"]
            for r in results
            if r["trainer"] == trainer and split_of(r) in splits
        }
        drawn = {x: max(error, _NOTHING) for x, error in errors.items() if error is not None}
        marker = "o" if trainer == OURS else "s"
        axis.plot(list(drawn), list(drawn.values()), marker, color=_COLOURS[trainer], label=label)
        if refused := [x for x, error in errors.items() if error is None]:
            axis.plot(refused, [2.0] * len(refused), "x", color=_COLOURS[trainer], label=f"{label}: refused")
    axis.axhline(tolerance, color="grey", linewidth=0.8, linestyle="--", label=f"tolerance {tolerance:g}")
    axis.set_yscale("log")
    axis.set_ylim(_NOTHING / 2, 5)
    axis.set_xticks(range(len(splits)), splits, rotation=60, fontsize=7)
    axis.set_xlabel("processes x micro-batch size", fontsize=8)
    axis.set_ylabel(f"relative update error, {report['steps']} steps", fontsize=8)
    axis.legend(fontsize=7, loc="center", bbox_to_anchor=(0.5, 0.6), ncols=2)
    _save(figure, axis, path)


def write_conform_plot(results: Sequence[dict[str, Any]], path: Path, tolerance: float = 1e-5) -> None:
    """The error of each objective's update from the same completions, a point for each split."""
    first = next(result for result in results if result["name"] == OURS)
    objectives = list(dict.fromkeys(cell["objective"] for cell in first["cells"]))
    stock = max((result for result in results if result["name"] == "TRL"), key=lambda result: result["version"])
    figure = Figure(figsize=(8.0, 3.8))
    axis = figure.subplots()
    for result, trainer, marker in ((stock, STOCK, "s"), (first, OURS, "o")):
        drawn = [cell for cell in result["cells"] if cell["dtype"] == "float64" and "error" in cell]
        places = [objectives.index(cell["objective"]) + (0.12 if trainer == STOCK else -0.12) for cell in drawn]
        errors = [max(cell["error"], _NOTHING) for cell in drawn]
        label = f"stock TRL {result['version']}" if trainer == STOCK else OURS
        axis.plot(places, errors, marker, color=_COLOURS[trainer], markersize=4, alpha=0.7, label=label)
    axis.axhline(tolerance, color="grey", linewidth=0.8, linestyle="--", label=f"tolerance {tolerance:g}")
    axis.set_yscale("log")
    axis.set_ylim(_NOTHING, 2)
    axis.set_xticks(range(len(objectives)), objectives, rotation=40, fontsize=8, ha="right")
    axis.set_ylabel("relative error of the update", fontsize=8)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(0.0, 0.62))
    _save(figure, axis, path)


if __name__ == "__main__":
    kind, *files = sys.argv[1:]
    first, *others = (Path(file) for file in files)
    if kind == "check":
        write_check_plot(json.loads(first.read_text()), *others)
    else:
        write_held_out_plot(others, first)
