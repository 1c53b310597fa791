"""`grpo-ext report`: what a run did, or how several differ, on one page without server, network or JavaScript.

Differs from a tracker: it is written from the log in the run's own folder, also of a run that goes on or was killed,
and says with which settings the run started. plots.py draws the curves.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..algorithms.pass_at_k import first_and_last
from ..errors import ConfigError
from ..run.log import LOG, LoggedRun, read_log
from .plots import HELD_OUT, Series, draw, figure_class, plots_of

PAGE, TEMPLATE = "index.html", "report.html"
MARK = "grpo-ext report"  # the page's generator
MEMORY = "peak_memory_mib"  # of a log line, beside its values
_COMPARED = ("settings", "geometry", "versions", "data", "model", "tokenizer", "rewards")  # parts of a start

Rows = list[tuple[str, list[str]]]  # of a table: a name and one value for each column


@dataclass(frozen=True)
class Run:
    """A run as the report shows it; it may have ended, been killed or still go on.

    Attributes:
        name: its folder.
        log: without lines that a resume has superseded.
        series: every number that was logged, by name, in the order of its first appearance.
    """

    name: str
    log: LoggedRun
    series: dict[str, Series]

    @property
    def status(self) -> str:
        """How the last start ended."""
        if self.log.starts and self.log.starts[-1].get("ended"):
            return str(self.log.starts[-1]["ended"])
        # transformers' last line; a callback at the end of training writes the report before the end is logged
        finished = "train_runtime" in self.log.entries[-1]["values"]
        return "finished" if finished else "not finished: it goes on, or was killed"

    @property
    def remarks(self) -> str:
        """What was resumed or is missing."""
        remarks = []
        if self.log.unreadable:
            remarks.append(f"{self.log.unreadable} line(s) of {LOG} were not finished (a kill while writing).")
        if self.log.resumed_from:
            steps = ", ".join(map(str, self.log.resumed_from))
            remarks.append(f"Resumed from step {steps}; log lines of steps that were done again are left out.")
        return " ".join(remarks)


def report(runs: Sequence[str | Path]) -> Path:
    """Write the report of a run into its folder, or the comparison of several beside the first; returns the page.

    Raises:
        ConfigError: a folder holds no run, another page is in the way, or a library is missing.
    """
    try:
        from jinja2 import Environment, FileSystemLoader
    except ImportError:
        raise ConfigError("the report needs jinja2; install it with `pip install 'grpo-ext[plot]'`.") from None
    figure_class()  # raises before anything is read
    loaded = [load_run(path) for path in runs]
    names, first = [run.name for run in loaded], Path(runs[0]).resolve()
    if len(loaded) == 1:
        folder, starts = first / "report", loaded[0].log.starts
        compared = [f"start {number + 1}" for number in range(len(starts))]
    else:
        folder, compared = first.parent / "report-comparison", names
        starts = [run.log.starts[-1] if run.log.starts else {} for run in loaded]
    plots = plots_of({run.name: run.series for run in loaded})
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template(TEMPLATE).render(
        mark=MARK,
        runs=loaded,
        names=names,
        headlines=_rows([_headline(run) for run in loaded]),
        compared=compared,
        differences=_differences(starts),
        plots=[(plot, base64.b64encode(draw(plot)).decode()) for plot in plots],
        same=[plot.title for plot in plots if len(plot.curves) == len(loaded) > 1 and plot.identical],
        values=_rows([_first_and_last_values(run) for run in loaded]),
    )
    return _write(folder / PAGE, text)


def _write(page: Path, text: str) -> Path:
    """Write the page whole or not at all.

    Raises:
        ConfigError: what is there is no report.
    """
    if page.parent.is_file() or (page.exists() and f'content="{MARK}"' not in page.read_text(errors="replace")[:2000]):
        raise ConfigError(f"{page} would replace what is no report; move that elsewhere.")
    page.parent.mkdir(parents=True, exist_ok=True)
    beside = page.with_name(f".{page.name}")
    beside.write_text(text, encoding="utf-8", errors="replace")
    os.replace(beside, page)
    return page


def load_run(path: str | Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: there is no such folder, or no log of a run in it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name the output_dir of a run.")
    log = read_log(folder / LOG) if (folder / LOG).is_file() else LoggedRun()
    if not log.entries:
        raise ConfigError(
            f"{folder} holds no log lines (no {LOG}); name the output_dir of a run that has logged a step."
        )
    series: dict[str, Series] = {}
    for entry in log.entries:
        for name, value in {**entry["values"], MEMORY: entry.get(MEMORY)}.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                steps, values = series.setdefault(name, ([], []))
                steps.append(entry["step"])
                values.append(float(value))
    with contextlib.suppress(OSError, ValueError, KeyError):  # no demo, or one that has not ended
        scores = json.loads((folder / "metrics.json").read_text())["exact_match_by_step"]
        points = sorted((int(step), value) for step, value in scores.items())
        series[HELD_OUT] = [step for step, _ in points], [value for _, value in points]
    return Run(str(path), log, series)


def _headline(run: Run) -> dict[str, str]:
    """What is read first, by name."""
    last = run.log.starts[-1] if run.log.starts else {}
    model, max_steps = last.get("model") or {}, (last.get("settings") or {}).get("max_steps", -1)
    rows: dict[str, str] = {}
    if model:
        rows["model"] = str(last.get("model_name") or model.get("class"))
        rows["parameters"] = f"{model.get('parameters', 0):,}{', with adapters' if model.get('adapters') else ''}"
    rows["steps"] = f"{run.log.entries[-1]['step']}" + (f" of {max_steps}" if max_steps > 0 else "")
    rows["state"] = run.status
    for name in ("reward", *first_and_last(run.series), HELD_OUT, "eval_reward"):
        if name in run.series:
            _, values = run.series[name]
            rows[f"{name}, first -> last"] = f"{_number(values[0])} -> {_number(values[-1])}"
    rows["training time"] = f"{timedelta(seconds=round(run.log.seconds))} in train()"
    return rows


def _first_and_last_values(run: Run) -> dict[str, str]:
    """First and last, least and most of every logged value."""
    rows = {}
    for name, (_, values) in run.series.items():
        first, last, least, most = map(_number, (values[0], values[-1], min(values), max(values)))
        rows[name] = f"{first} -> {last} ({least} to {most})"
    return rows


def _differences(starts: Sequence[Mapping[str, Any]]) -> Rows:
    """What differs between the starts of runs, or of one run, each with its values."""
    columns: list[dict[str, str]] = [{} for _ in starts]
    for start, column in zip(starts, columns):
        for part in (name for name in _COMPARED if name in start):
            values = start[part] if isinstance(start[part], dict) else {"": start[part]}
            column.update({f"{part}.{name}".rstrip("."): str(value) for name, value in values.items()})
    return [(name, values) for name, values in _rows(columns, "not recorded") if len(set(values)) > 1]


def _rows(columns: Sequence[Mapping[str, str]], missing: str = "-") -> Rows:
    """The rows of a table, from the values of each column by the name of their row."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, missing) for column in columns]) for name in names]


def _number(value: float) -> str:
    """A number with four digits."""
    return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"


def report_or_reason(folder: str | Path) -> str:
    """Write the report of a run and say where it is, or why there is none; never raises."""
    try:
        return f"Report: {report([folder])}"
    except ConfigError as error:
        return f"No report was written: {error}"
    except Exception as error:  # the training is done and must not fail by its report
        return f"No report was written ({type(error).__name__}: {error}); the run itself is complete."


class ReportCallback(TrainerCallback):
    """Writes the report when training ends: `GRPOTrainer(callbacks=[ReportCallback()])`."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """On the main process alone."""
        if state.is_world_process_zero:
            print(report_or_reason(args.output_dir), flush=True)
