"""`steps.jsonl` in a run's folder, the one record of a run, as its readers see it: `grpo-ext diff`, `rerun`, `report`.

A line begins with its kind and a step: the "start" of a training call and its "end"; a "log" of the Trainer; with
`trail=True` also a "rollout" batch and an optimizer "step", as digests and values (run.trail). A start supersedes what
comes after the step that it resumes from. Written by run.log. Imports neither torch nor TRL.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError

STEPS = "steps.jsonl"
RERUNS, STEP = "rerun", "step.jsonl"  # in a run's folder: of steps that were run again (run.rerun)
COPIED = "copied"  # what follows are the lines of the run in another folder, from which this one was resumed
_PROJECTIONS = 2  # algorithms.digests, which imports torch
_EARLIER = ("log.jsonl", "trail.jsonl")
_BEGINS = re.compile(rb'\{"line": "(start|copied|rollout|step|log|end)", "step": (\d+)[,}]')
_TRAIL = (b"rollout", b"step")
_MAPPINGS = ("settings", "geometry", "versions", "environment", "model", "data")  # of a start, where it has them


@dataclass
class Record:
    """A record without superseded lines; steps are counted from 1. A start's "step" is the one it resumes after."""

    starts: list[dict[str, Any]] = field(default_factory=list)  # oldest first; with "ended" where the call has ended
    entries: list[dict[str, Any]] = field(default_factory=list)  # logs: step, epoch, time and values
    rollouts: dict[int, dict[str, Any]] = field(default_factory=dict)  # by the first step that trains on it
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)  # 0: the weights at the start
    seconds: float = 0.0  # spent in training calls, superseded steps included

    @property
    def trained(self) -> list[int]:
        return sorted(self.steps.keys() - {0})

    @property
    def resumed_from(self) -> list[int]:
        return [start["step"] for start in self.starts if start["step"]]

    @property
    def projected(self) -> list[int]:
        """Steps, and 0 for the start, after which the projections of the weights are known."""
        known = ((step, line.get("weights") or {}) for step, line in self.steps.items())
        return sorted(step for step, weights in known if weights and all(part for _, part in weights.values()))

    def start_of(self, step: int) -> dict[str, Any]:
        """The start of the training call that made a step."""
        return next((start for start in reversed(self.starts) if start["step"] < step), self.starts[0])


def read_record(folder: str | Path, trail: bool = True) -> Record:
    """The record of a run, which may still be running; `trail=False` leaves out rollouts and steps, unread.

    Raises:
        ConfigError: the folder has none, that of an earlier version, or one with a line that is not as it was written.
    """
    path, record, seconds = Path(folder) / STEPS, Record(), 0.0  # seconds of the training call so far
    begins: list[int] = []  # of the entries: the step that their training call resumed after
    for line in _lines(path, trail):
        kind, step = line["line"], line["step"]
        if kind == "log":
            record.entries.append(line)
            begins.append(record.starts[-1]["step"] if record.starts else 0)
            record.seconds += line["time"] - seconds
            seconds = line["time"]
        elif kind == "rollout":
            record.rollouts[step] = line
        elif kind == "step":
            record.steps[step] = line
        elif kind == "end" and record.starts:
            record.starts[-1] |= {name: value for name, value in line.items() if name not in ("line", "step")}
        elif step == 0:
            record, begins, seconds = Record(), [], 0.0
        else:
            seconds = 0.0
            # a call that resumed here may have logged this step too: an evaluation that was put off
            old = zip(record.entries, begins, strict=True)
            pairs = [(entry, begin) for entry, begin in old if entry["step"] <= step and begin < step]
            record.entries, begins = [entry for entry, _ in pairs], [begin for _, begin in pairs]
            record.steps = {number: one for number, one in record.steps.items() if number <= step}
            record.rollouts = {number: one for number, one in record.rollouts.items() if number <= step}
        if kind == "start":
            record.starts.append(line)
    return record


def _lines(path: Path, trail: bool) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        earlier = next((name for name in _EARLIER if path.with_name(name).is_file()), None)
        if earlier is not None:
            raise ConfigError(
                f"{path.parent} has {earlier}, which an earlier version of grpo_ext wrote; use that version."
            )
        raise ConfigError(
            f"{path.parent} is not the output_dir of a run: it has no {STEPS}, which a run of grpo_ext writes when it "
            "begins to train."
        )
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            begins = _BEGINS.match(raw)
            if begins and not trail and begins[1] in _TRAIL:
                continue
            if begins and (line := _parsed(raw)) is not None and _WHOLE[line["line"]](line):
                yield line
            elif raw.endswith(b"\n"):  # else a kill has cut it, or it is being written
                raise ConfigError(
                    f"{path}: line {number} is not as it was written. Restore the file, or remove the line."
                )


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _has(part: Any, **kinds: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(part.get(name), kind) for name, kind in kinds.items())


def _start(line: Mapping[str, Any]) -> bool:
    return all(isinstance(line.get(name) or {}, dict) for name in _MAPPINGS)


def _rollout(line: Mapping[str, Any]) -> bool:
    part = {"count": int, "group": int, "rewards": dict, "rows": list, "prompts": list, "completions": list}
    rounds = _has(line, rounds=list, advantages=list) and all(_has(one, **part) for one in line["rounds"])
    return rounds and all(
        one["group"] > 0 and all(isinstance(values, list) for values in one["rewards"].values())
        for one in line["rounds"]
    )


def _step(line: Mapping[str, Any]) -> bool:
    weights = line.get("weights", {})
    if not _has(line, values=dict) or not isinstance(weights, dict):
        return False
    pairs = all(isinstance(part, list) and len(part) == 2 for part in weights.values())
    return pairs and all(part is None or _projections(part) for _, part in weights.values())


def _projections(part: Any) -> bool:
    """None stands for what is not finite."""
    return (
        isinstance(part, list)
        and len(part) == _PROJECTIONS
        and all(isinstance(value, int | float | None) for value in part)
    )


def _log(line: Mapping[str, Any]) -> bool:
    return _has(line, time=int | float, values=dict)


_WHOLE: dict[str, Callable[[Any], bool]] = {
    **{"start": _start, "rollout": _rollout, "step": _step, "log": _log},
    **dict.fromkeys((COPIED, "end"), lambda line: True),
}


def refuse_unknown(step: int, record: Record, folder: str | Path) -> None:
    """A ConfigError for a step that a record has not."""
    if step < 1 or step not in record.steps:
        steps = record.trained
        known = f"its record has the steps {steps[0]} to {steps[-1]}" if steps else "its record has no steps"
        raise ConfigError(f"{folder} has no step {step}; {known}.")


def tables_of(folder: str | Path, record: Record) -> dict[int, Path]:
    """The tables of completions (TRL's `log_completions`) of a run by their step, without an earlier run's."""
    began = 0.0
    with suppress(IndexError, KeyError, ValueError, TypeError):
        began = datetime.fromisoformat(record.starts[0]["started"]).timestamp()
    logged = {entry["step"] for entry in record.entries}
    matches = (
        (re.fullmatch(r"completions_(\d+)", path.stem), path) for path in Path(folder).glob("completions/*.parquet")
    )
    numbered = {int(match[1]): path for match, path in matches if match}
    return {step: path for step, path in sorted(numbered.items()) if step in logged and path.stat().st_mtime >= began}


def differences(changes: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Where pairs of values differ, as `name.key`, both values."""
    for name, (old, new) in changes.items():
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            yield from differences({f"{name}.{key}": (old.get(key), new.get(key)) for key in keys})
        else:
            yield name, old, new


def finite(value: Any) -> Any:
    """A value in JSON's types, with None for NaN and infinity."""
    return json.loads(json.dumps(value, default=_plain), parse_constant=lambda name: None)


def _plain(value: Any) -> Any:
    """A value for JSON: a tensor of one number as that number, other objects as text."""
    if value is None or isinstance(value, (str, int)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return str(value)
