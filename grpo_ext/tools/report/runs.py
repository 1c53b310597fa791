"""What a run has left behind, read for its report: log lines, and what its starts recorded.

The run may have ended, been killed or still go on. The first stage of `grpo-ext report`; plots.py draws it and page.py
writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...algorithms.pass_at_k import first_and_last
from ...errors import ConfigError
from ...run.log import LOG, LoggedRun, read_log

METRICS = "metrics.json"
MEMORY = "peak_memory_mib"  # of a log line, beside its values
HELD_OUT = "held_out_exact_match"  # the demo's own measurement, in metrics.json
_COMPARED = ("settings", "geometry", "versions", "data", "model", "tokenizer", "rewards")  # parts of a start


@dataclass
class Run:
    """A run as the report shows it.

    Attributes:
        name: as it was given: its folder.
        log: without lines that a resume has superseded.
    """

    name: str
    log: LoggedRun

    def names(self) -> list[str]:
        """Every value that was logged as a number, in the order of its first appearance."""
        logged = (e["values"] | {MEMORY: e.get(MEMORY)} for e in self.log.entries)
        return list(dict.fromkeys(name for values in logged for name, v in values.items() if _is_number(v)))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of what was logged under a name; lines without a number are left out."""
        values = [(e["step"], (e if name == MEMORY else e["values"]).get(name)) for e in self.log.entries]
        rows: list[tuple[int, Any]] = [(step, value) for step, value in values if _is_number(value)]
        return [step for step, _ in rows], [float(value) for _, value in rows]

    @property
    def status(self) -> str:
        """How the last start ended."""
        if self.log.starts and self.log.starts[-1].get("ended"):
            return str(self.log.starts[-1]["ended"])
        last_step = max(entry["step"] for entry in self.log.entries)
        if any("train_runtime" in e["values"] and e["step"] == last_step for e in self.log.entries):
            return "finished"
        return "not finished: it goes on, or was killed"

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


def load_run(path: str | Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: there is no such folder, or no log of a run in it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name the output_dir of a run.")
    try:
        log = read_log(folder / LOG)
    except OSError:
        log = LoggedRun()
    if not log.entries:
        raise ConfigError(
            f"{folder} holds no log lines (no {LOG}); name the output_dir of a run that has logged a step."
        )
    try:
        scores = json.loads((folder / METRICS).read_text())["exact_match_by_step"]
    except (OSError, ValueError, KeyError):  # no demo, or one that has not ended
        scores = {}
    points = sorted((int(step), value) for step, value in scores.items())
    log.entries += [{"step": step, "values": {HELD_OUT: value}} for step, value in points]
    return Run(str(path), log)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- Tables ---------------------------------------------------------------------------------------------------------


def flat_settings(start: Mapping[str, Any]) -> dict[str, str]:
    """Everything that two starts may be compared by, by its name and that of its part: "settings.beta"."""
    flat: dict[str, Any] = {}
    for part in (name for name in _COMPARED if name in start):
        value = start[part]
        flat |= {f"{part}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {part: value}
    return {name: json.dumps(v, default=str) if isinstance(v, (dict, list)) else str(v) for name, v in flat.items()}


def differences(compared: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """The settings that differ between runs, or between the starts of one, each with its values."""
    rows = table(compared, "not recorded")
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def table(columns: Sequence[Mapping[str, str]], missing: str = "-") -> list[tuple[str, list[str]]]:
    """The rows of a table, from the values of each column by the name of their row."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, missing) for column in columns]) for name in names]


def headline(run: Run) -> dict[str, str]:
    """What is read first, by name."""
    last = run.log.starts[-1] if run.log.starts else {}
    model, settings = last.get("model") or {}, last.get("settings") or {}
    rows: dict[str, str] = {}
    if model:
        adapters = ", with adapters" if model.get("adapters") else ""
        rows["model"] = str(last.get("model_name") or model.get("class"))
        rows["parameters"] = f"{model.get('parameters', 0):,}{adapters}"
    steps = max(entry["step"] for entry in run.log.entries)
    rows["steps"] = f"{steps}" + (f" of {settings['max_steps']}" if settings.get("max_steps", -1) > 0 else "")
    rows["state"] = run.status
    passes = {name: name.removeprefix("eval_") for name in first_and_last(run.names())}
    for name, label in {"reward": "reward", **passes, HELD_OUT: "held-out exact match", "eval_reward": "eval"}.items():
        _, values = run.series(name)
        if values:
            rows[f"{label}, first -> last"] = f"{number(values[0])} -> {number(values[-1])}"
    rows["training time"] = f"{timedelta(seconds=round(run.log.seconds))} in train()"
    if settings:
        rows["precision"] = next((kind for kind in ("bf16", "fp16") if settings.get(kind)), "float32")
    return rows


def value_table(run: Run) -> dict[str, str]:
    """First and last, least and most of every logged value."""
    rows = {}
    for name in run.names():
        _, values = run.series(name)
        first, last, least, most = (number(v) for v in (values[0], values[-1], min(values), max(values)))
        rows[name] = f"{first} -> {last} ({least} to {most})"
    return rows


def number(value: float) -> str:
    """A number with four digits."""
    return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"
