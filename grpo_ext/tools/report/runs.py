"""What a run has left behind, read for its report: log lines, manifest, plan and settings.

The run may have ended, been killed or still go on. The first stage of `grpo-ext report`; plots.py draws it and page.py
writes it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...algorithms.pass_at_k import first_and_last
from ...batching.plan_text import describe_plan
from ...batching.sizes import BatchGeometry
from ...errors import ConfigError, GrpoExtError
from ...run.log import LOG, LoggedRun, read_log
from ...run.manifest import read_manifest

METRICS = "metrics.json"
MEMORY = "peak_memory_mib"  # of a log line, beside its values
HELD_OUT = "held_out_exact_match"  # the demo's own measurement, in metrics.json
HEADLINE = (  # settings
    *("loss_type", "loss_aggregation", "advantage_estimator", "dynamic_sampling", "num_generations"),
    *("global_batch_size", "learning_rate", "beta", "epsilon", "temperature", "scale_rewards"),
    *("max_completion_length", "seed", "bitwise_invariant"),
)


@dataclass
class Run:
    """A run as the report shows it.

    Attributes:
        folder: of the run.
        entries: log lines, oldest first: step, epoch, time (seconds) and values by name.
        seconds: spent in training calls; None where that was not recorded.
        max_steps: optimizer steps that were planned, or None.
        manifest: one entry for each start.
        remarks: sentences about what is missing or was repaired.
    """

    folder: Path
    entries: list[dict[str, Any]]
    seconds: float | None = None
    max_steps: int | None = None
    manifest: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def last_step(self) -> int:
        """Optimizer steps logged."""
        return max((entry["step"] for entry in self.entries), default=0)

    def names(self) -> list[str]:
        """Every value that was logged as a number, in the order of its first appearance."""
        logged = (e["values"] | {MEMORY: e.get(MEMORY)} for e in self.entries)
        return list(dict.fromkeys(name for values in logged for name, v in values.items() if _is_number(v)))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of what was logged under a name; lines without a number are left out."""
        values = [(e["step"], (e if name == MEMORY else e["values"]).get(name)) for e in self.entries]
        rows: list[tuple[int, Any]] = [(step, value) for step, value in values if _is_number(value)]
        return [step for step, _ in rows], [float(value) for _, value in rows]

    @property
    def status(self) -> str:
        """How the last start ended."""
        if self.manifest and self.manifest[-1].get("ended"):
            return str(self.manifest[-1]["ended"])
        if any("train_runtime" in e["values"] and e["step"] == self.last_step for e in self.entries):
            return "finished"
        return "not finished: it goes on, or was killed"

    @property
    def settings(self) -> dict[str, Any]:
        """Of the last start, by name with what they belong to: settings, geometry, versions, data, model."""
        return flat_settings(self.manifest[-1]) if self.manifest else {}


def load_run(path: str | Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: there is no such folder, or no log of a run in it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name the output_dir of a run.")
    try:
        log: LoggedRun = read_log(folder / LOG)
    except OSError:
        log = LoggedRun()
    if not log.entries:
        raise ConfigError(
            f"{folder} holds no log lines (no {LOG}); name the output_dir of a run that has logged a step."
        )
    run = Run(folder, log.entries, log.seconds, manifest=read_manifest(folder))
    if log.unreadable:
        run.remarks.append(f"{log.unreadable} line(s) of {LOG} were not finished (a kill while writing); left out.")
    if log.resumed_from:
        steps = ", ".join(map(str, log.resumed_from))
        run.remarks.append(f"Resumed from step {steps}; log lines of steps that were done again are left out.")
    if not run.manifest:
        run.remarks.append("There is no manifest.json, so settings, versions and the plan are not known.")
    elif run.manifest[-1].get("settings", {}).get("max_steps", -1) > 0:
        run.max_steps = run.manifest[-1]["settings"]["max_steps"]
    _add_held_out(run)
    return run


def _add_held_out(run: Run) -> None:
    try:
        by_step = json.loads((run.folder / METRICS).read_text())["exact_match_by_step"]
    except (OSError, ValueError, KeyError):  # no demo, or one that has not ended
        return
    points = sorted((int(step), value) for step, value in by_step.items())
    run.entries += [{"step": s, "epoch": None, "time": None, "values": {HELD_OUT: v}} for s, v in points]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- What the manifest says ---------------------------------------------------------------------------------------


def flat_settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of everything in a manifest entry that two runs may be compared by."""
    groups = {name: entry.get(name) for name in ("settings", "geometry", "versions", "data", "model")}
    known = {name: group for name, group in groups.items() if isinstance(group, Mapping)}
    flat = {f"{group}.{name}": value for group, values in known.items() for name, value in values.items()}
    flat |= {name: entry[name] for name in ("tokenizer", "rewards") if name in entry}
    twice = {f"geometry.{name}" for name in known.get("settings", {})}
    return {name: value for name, value in flat.items() if name not in twice}


def differences(all_settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The settings that differ between runs, or between the starts of one, each with its values.

    Args:
        all_settings: what `flat_settings` gives, one for each.
    """
    names = dict.fromkeys(name for settings in all_settings for name in settings)
    rows = [(name, [_shown(s[name]) if name in s else "not recorded" for s in all_settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _shown(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, (dict, list)) else str(value)


def plan_of(entry: Mapping[str, Any]) -> str:
    """The plan of a start as `grpo-ext plan` prints it; empty where it was not recorded."""
    known = {f.name for f in dataclasses.fields(BatchGeometry)}
    sizes = {name: value for name, value in (entry.get("geometry") or {}).items() if name in known}
    settings = entry.get("settings") or {}
    rows = (entry.get("data") or {}).get("rows")
    epochs = None if settings.get("max_steps", -1) > 0 else settings.get("num_train_epochs")
    try:
        return describe_plan(BatchGeometry(**sizes), rows, bool(settings.get("dataloader_drop_last")), epochs)
    except (TypeError, ValueError, ArithmeticError, GrpoExtError):  # another version's manifest
        return ""


def headline(run: Run) -> dict[str, str]:
    """What is read first, by name."""
    last = run.manifest[-1] if run.manifest else {}
    model, settings = last.get("model") or {}, last.get("settings") or {}
    rows: dict[str, str] = {}
    if model:
        adapters = ", with adapters" if model.get("adapters") else ""
        rows["model"] = str(last.get("model_name") or model.get("class"))
        rows["parameters"] = f"{model.get('parameters', 0):,}{adapters}"
    rows["steps"] = f"{run.last_step}" + (f" of {run.max_steps}" if run.max_steps else "")
    rows["state"] = run.status
    passes = {name: name.removeprefix("eval_") for name in first_and_last(run.names())}
    for name, label in {"reward": "reward", **passes, HELD_OUT: "held-out exact match", "eval_reward": "eval"}.items():
        _, values = run.series(name)
        if values:
            rows[f"{label}, first -> last"] = f"{number(values[0])} -> {number(values[-1])}"
    seconds = run.seconds
    rows["training time"] = "not recorded" if seconds is None else f"{timedelta(seconds=round(seconds))} in train()"
    rows |= {name: _shown(settings[name]) for name in HEADLINE if settings.get(name) not in (None, False)}
    if settings:
        rows["precision"] = next((kind for kind in ("bf16", "fp16") if settings.get(kind)), "float32")
    return rows


def value_table(run: Run) -> dict[str, str]:
    """First and last, least and most of every logged value."""
    table = {}
    for name in run.names():
        _, values = run.series(name)
        first, last, least, most = (number(v) for v in (values[0], values[-1], min(values), max(values)))
        table[name] = f"{first} -> {last} ({least} to {most})"
    return table


# ---- Words --------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """A number with four digits."""
    return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"
