"""`grpo-ext report`: what a run did, on one page that needs no server, no network and no JavaScript.

Differs from a tracker: it is written from the run's own folder, also of a run that was killed, and says with which
settings and from where. The last stage: runs.py reads, plots.py draws, this writes.
"""

from __future__ import annotations

import base64
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ...errors import ConfigError
from .plots import SPECS, Panel, comparison_panels, draw, panels, plotting
from .runs import (
    Run,
    completions_of_last,
    completions_over_run,
    differences,
    flat_settings,
    headline,
    load_run,
    number,
    plan_of,
)

PAGE, FOLDER, COMPARISON = "index.html", "report", "report-comparison"
MARK = '<meta name="generator" content="grpo-ext report">'


def report(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several; returns the path of the page.

    Args:
        runs: folders of runs, or checkpoints.
        output: the folder to write. Default: `report` in the run's folder (beside a checkpoint: `report-checkpoint-N`),
            for several runs `report-comparison` beside the first, or the next free number.

    Raises:
        ConfigError: a folder holds no run, `output` holds something that is no report, or matplotlib is missing.
    """
    if not runs:
        raise ConfigError("name the folder of a run, or of several to compare.")
    return write_report(runs[0], output) if len(runs) == 1 else write_comparison(runs, output)


def write_report(path: str | Path, output: str | Path | None = None) -> Path:
    """The page of one run; see `report`."""
    plotting()
    run = load_run(path)
    completions = list(zip(("Best over the run", "Worst over the run"), completions_over_run(run)))
    for evaluation, what in ((False, "rollouts"), (True, "evaluation")):
        step, *extremes = completions_of_last(run, evaluation)
        completions += zip((f"{kind} of the last {what}, step {step}" for kind in ("Best", "Worst")), extremes)
    return _write(
        default_folder(run.folder) if output is None else Path(output),
        "report.html",
        panels(run),
        {
            "run": run,
            "headline": headline(run),
            "plan": plan_of(run.manifest[-1]) if run.manifest else "",
            "changed": differences([flat_settings(entry) for entry in run.manifest]),
            "values": value_table(run),
            "completions": completions,
        },
    )


def write_comparison(paths: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """The page of several runs; see `report`."""
    plotting()
    runs = [load_run(path) for path in paths]
    names = distinct_names(runs)
    plots = comparison_panels(runs, names)
    return _write(
        _free_comparison(runs[0].folder.resolve().parent) if output is None else Path(output),
        "comparison.html",
        plots,
        {
            "runs": list(zip(names, runs)),
            "headlines": [dict(headline(run)) for run in runs],
            "differences": differences([run.settings for run in runs]),
            "final": {name: [_last(run, name) for run in runs] for every in runs for name in every.names()},
            "same": [panel.title for panel in plots if panel.identical],
        },
    )


def default_folder(run: Path) -> Path:
    """Where the report of a run goes; a checkpoint's goes beside it, since a checkpoint's files are listed."""
    resolved = run.resolve()
    return resolved.parent / f"{FOLDER}-{run.name}" if resolved.name.startswith("checkpoint-") else run / FOLDER


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run: of its folder, with as much of the path as tells them apart."""
    short, whole = [run.name for run in runs], [str(run.folder) for run in runs]
    for names in (short, whole):
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(whole, start=1)]


def value_table(run: Run) -> list[tuple[str, list[str]]]:
    """Every logged value: name and its first, last, least and most."""
    rows = []
    for name in run.names():
        _, values = run.series(name)
        rows.append((name, [number(v) for v in (values[0], values[-1], min(values), max(values))]))
    return rows


def _last(run: Run, name: str) -> str:
    _, values = run.series(name)
    return number(values[-1]) if values else "not logged"


# ---- Writing ------------------------------------------------------------------------------------------------------


def _write(folder: Path, template: str, plots: Sequence[Panel], content: dict[str, Any]) -> Path:
    check_replaceable(folder)
    pictures = {panel.name: draw(panel) for panel in plots}
    shown = [(panel, base64.b64encode(pictures[panel.name]).decode()) for panel in plots]
    page = render(template, {**content, "plots": shown, "mark": MARK})
    folder.mkdir(parents=True, exist_ok=True)
    for spec in SPECS:
        (folder / f"{spec.name}.png").unlink(missing_ok=True)
    for name, picture in pictures.items():
        (folder / f"{name}.png").write_bytes(picture)
    beside = folder / f".{PAGE}"
    beside.write_bytes(page.encode("utf-8", "replace"))
    os.replace(beside, folder / PAGE)
    return folder / PAGE


def render(template: str, content: Mapping[str, Any]) -> str:
    """Fill a template; everything is escaped, because a model wrote part of it.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader
    except ImportError:
        raise ConfigError("the report needs jinja2; install it with `pip install 'grpo-ext[plot]'`.") from None
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["infinity"] = math.inf
    environment.filters |= {"visible": visible, "number": number}
    return environment.get_template(template).render(**content)


def visible(text: str) -> str:
    """Control characters as their symbols; line breaks and tabs stay."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)


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


def _free_comparison(folder: Path) -> Path:
    names = itertools.chain([COMPARISON], (f"{COMPARISON}-{i}" for i in itertools.count(2)))
    return next(path for name in names if not (path := folder / name).exists())


# ---- At the end of training ---------------------------------------------------------------------------------------


def report_or_reason(folder: str | Path) -> str:
    """Write the report of a run and say where it is, or why there is none; never raises."""
    try:
        return f"Report: {write_report(folder)}"
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
