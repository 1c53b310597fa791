"""`grpo-ext report`: what a run did, or how several differ, on one page without server, network or JavaScript.

Differs from a tracker: it is written from the run's own folder, also of a run that was killed, and says with which
settings and from where. The last stage: runs.py reads, plots.py draws, this writes.
"""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ...errors import ConfigError
from ..plots import figure_class
from .plots import draw, panels
from .runs import Run, differences, flat_settings, headline, load_run, plan_of, value_table

PAGE, FOLDER, COMPARISON = "index.html", "report", "report-comparison"
MARK = '<meta name="generator" content="grpo-ext report">'


def report(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several; returns the path of the page.

    Args:
        runs: folders of runs.
        output: the folder to write. Default: `report` in the run's folder, for several runs `report-comparison` beside
            the first, or the next free number.

    Raises:
        ConfigError: a folder holds no run, `output` holds something that is no report, or matplotlib is missing.
    """
    if not runs:
        raise ConfigError("name the folder of a run, or of several to compare.")
    figure_class()  # before anything is read
    loaded = [load_run(path) for path in runs]
    names = distinct_names(loaded)
    starts = [flat_settings(entry) for entry in loaded[0].manifest]
    compared = starts if len(loaded) == 1 else [run.settings for run in loaded]
    plots = panels(loaded, names)
    content = {
        "mark": MARK,
        "runs": list(zip(names, loaded)),
        "headlines": _rows([headline(run) for run in loaded]),
        "compared": [f"start {n}" for n in range(1, len(starts) + 1)] if len(loaded) == 1 else names,
        "differences": differences(compared),
        "plots": [(panel, base64.b64encode(draw(panel)).decode()) for panel in plots],
        "same": [panel.title for panel in plots if panel.identical],
        "values": _rows([value_table(run) for run in loaded]),
    }
    return _write(default_folder(loaded) if output is None else Path(output), render(content))


def default_folder(runs: Sequence[Run]) -> Path:
    """Where a report goes."""
    folder = runs[0].folder.resolve()
    if len(runs) > 1:
        names = itertools.chain([COMPARISON], (f"{COMPARISON}-{i}" for i in itertools.count(2)))
        return next(path for name in names if not (path := folder.parent / name).exists())
    return runs[0].folder / FOLDER


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run: of its folder, with as much of the path as tells them apart."""
    short, whole = [run.name for run in runs], [str(run.folder) for run in runs]
    for names in (short, whole):
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(whole, start=1)]


def _rows(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """The rows of a table, from the values of each column by the name of their row."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "-") for column in columns]) for name in names]


def render(content: Mapping[str, Any]) -> str:
    """Fill the template; everything is escaped.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader
    except ImportError:
        raise ConfigError("the report needs jinja2; install it with `pip install 'grpo-ext[plot]'`.") from None
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"plan": plan_of}
    return environment.get_template("report.html").render(**content)


def _write(folder: Path, page: str) -> Path:
    check_replaceable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{PAGE}"
    beside.write_bytes(page.encode("utf-8", "replace"))
    os.replace(beside, folder / PAGE)
    return folder / PAGE


def check_replaceable(folder: Path) -> None:
    """Refuse to write into anything but a new folder, an empty one or an earlier report.

    Raises:
        ConfigError: the folder holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder for the report with --output.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    page = folder / PAGE
    if not page.is_file() or MARK not in page.read_text(errors="replace")[:2000]:
        raise ConfigError(f"{folder} holds files and no report, so it is left alone; name another one with --output.")


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
