"""`grpo-ext report`: what a run did, or how several differ, on one page without server, network or JavaScript.

Differs from a tracker: it is written from the run's own folder, also of a run that was killed, and says with which
settings and from where. The last stage: runs.py reads, plots.py draws, this writes.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ...errors import ConfigError
from ..plots import figure_class
from .plots import draw, panels
from .runs import differences, flat_settings, headline, load_run, table, value_table

PAGE, FOLDER, COMPARISON = "index.html", "report", "report-comparison"
MARK = '<meta name="generator" content="grpo-ext report">'


def report(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several; returns the path of the page.

    Args:
        runs: folders of runs.
        output: the folder to write. Default: `report` in the run's folder, for several runs `report-comparison` beside
            the first.

    Raises:
        ConfigError: a folder holds no run, `output` holds a page that is no report, or a library is missing.
    """
    if not runs:
        raise ConfigError("name the folder of a run, or of several to compare.")
    figure_class()  # before anything is read
    loaded = [load_run(path) for path in runs]
    first = Path(runs[0]).resolve()
    folder = first / FOLDER if len(runs) == 1 else first.parent / COMPARISON
    starts = loaded[0].log.starts
    if len(loaded) > 1:
        starts = [run.log.starts[-1] if run.log.starts else {} for run in loaded]
    plots = panels(loaded)
    content = {
        "mark": MARK,
        "runs": loaded,
        "headlines": table([headline(run) for run in loaded]),
        "compared": [f"start {n + 1}" for n in range(len(starts))] if len(loaded) == 1 else [r.name for r in loaded],
        "differences": differences([flat_settings(start) for start in starts]),
        "plots": [(panel, base64.b64encode(draw(panel)).decode()) for panel in plots],
        "same": [panel.title for panel in plots if panel.identical],
        "values": table([value_table(run) for run in loaded]),
    }
    return _write(folder if output is None else Path(output), _render(content))


def _render(content: dict[str, Any]) -> str:
    """Fill the template; everything is escaped."""
    try:
        from jinja2 import Environment, FileSystemLoader
    except ImportError:
        raise ConfigError("the report needs jinja2; install it with `pip install 'grpo-ext[plot]'`.") from None
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html").render(**content)


def _write(folder: Path, text: str) -> Path:
    page = folder / PAGE
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder for the report with --output.")
    if page.exists() and MARK not in page.read_text(errors="replace")[:2000]:
        raise ConfigError(f"{page} is no report, so it is left alone; name another folder with --output.")
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{PAGE}"
    beside.write_bytes(text.encode("utf-8", "replace"))
    os.replace(beside, page)
    return page


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
