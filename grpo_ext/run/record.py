"""`steps.jsonl` in a run's folder, the one record of a run, as its readers see it: `grpo-ext diff`, `rerun`, `report`.

A line begins with its kind and a step: the "start" of a training call and its "end"; a "log" of the Trainer; with
`trail=True` also a "rollout" batch and an optimizer "step", as digests and values (run.trail). A start supersedes what
comes after the step that it resumes from. Written by run.log. Imports neither torch nor TRL.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError

STEPS = "steps.jsonl"
RERUNS, STEP = "rerun", "step.jsonl"  # in a run's folder: of steps that were run again (run.rerun)
COPIED = "copied"  # what follows are the lines of the run in another folder, from which this one was resumed
_EARLIER = "log.jsonl"
_TRAIL = re.compile(rb'\{"line": "(rollout|step)"')
_CHECKSUM = b', "crc32": "'  # of what stands before it

Line = dict[str, Any]  # of a record or of step.jsonl, or a part of one
Identity = dict[str, Any]  # what a run is: settings, data, model; of a start or a checkpoint


@dataclass
class Record:
    """A record without superseded lines; steps are counted from 1. A start's "step" is the one it resumes after."""

    starts: list[Line] = field(default_factory=list)  # oldest first; with "ended" where the call has ended
    # logs: step, epoch, time, values, and as "begin" the step of their start
    entries: list[Line] = field(default_factory=list)
    rollouts: dict[int, Line] = field(default_factory=dict)  # by the first step that trains on it
    steps: dict[int, Line] = field(default_factory=dict)  # 0: the weights at the start
    seconds: float = 0.0  # spent in training calls, superseded steps included

    @property
    def trained(self) -> list[int]:
        return sorted(self.steps.keys() - {0})

    @property
    def resumed_from(self) -> list[int]:
        return [start["step"] for start in self.starts if start["step"]]

    @property
    def weighed(self) -> list[int]:
        """Steps, and 0 for the start, after which digests of the weights are known."""
        return sorted(step for step, line in self.steps.items() if "weights" in line)

    def start_of(self, step: int) -> Line:
        """The start of the training call that made a step."""
        return next((start for start in reversed(self.starts) if start["step"] < step), self.starts[0])


def read_record(folder: str | Path, trail: bool = True) -> Record:
    """The record of a run, which may still be running; `trail=False` leaves out rollouts and steps, unread.

    Raises:
        ConfigError: the folder has none, that of an earlier version, or one with a line that is not as it was written.
    """
    path = Path(folder) / STEPS
    if not path.is_file():
        if path.with_name(_EARLIER).is_file():
            raise ConfigError(f"an earlier version of grpo_ext wrote {folder} ({_EARLIER}); use that version.")
        raise ConfigError(
            f"{folder} is not the output_dir of a run: it has no {STEPS}, which a run writes when it begins to train."
        )
    record, seconds = Record(), 0.0  # seconds of the training call so far
    for line in lines_of(path, without=None if trail else _TRAIL):
        kind, step = line["line"], line["step"]
        if not record.starts and kind not in ("start", COPIED):
            raise ConfigError(f"{path} lacks the start of its run. Restore the file.")
        if kind == "log":
            record.entries.append({**line, "begin": record.starts[-1]["step"]})
            record.seconds += line["time"] - seconds
            seconds = line["time"]
        elif kind == "rollout":
            record.rollouts[step] = line
        elif kind == "step":
            record.steps[step] = line
        elif kind == "end":
            record.starts[-1] |= {name: value for name, value in line.items() if name not in ("line", "step")}
        elif step == 0:
            record, seconds = Record(), 0.0
        else:
            seconds = 0.0
            # a call that resumed here may have logged this step too: an evaluation that was put off
            record.entries = [part for part in record.entries if part["step"] <= step and part["begin"] < step]
            record.steps = {number: one for number, one in record.steps.items() if number <= step}
            record.rollouts = {number: one for number, one in record.rollouts.items() if number <= step}
        if kind == "start":
            record.starts.append(line)
    return record


def lines_of(path: Path, without: re.Pattern[bytes] | None = None) -> Iterator[Line]:
    """The lines of a file that `line_of` has made, but for those that begin with a pattern, which are not read.

    Raises:
        ConfigError: a line is not as it was written. A last one that a kill has cut, or that is being written, is none.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if without is not None and without.match(raw):
                continue
            text, _, end = raw.rpartition(_CHECKSUM)
            if end == b'%08x"}\n' % zlib.crc32(text):
                yield json.loads(text + b"}")
            elif raw.endswith(b"\n"):
                raise ConfigError(f"{path}: line {number} is not as it was written. Restore the file.")


def line_of(content: Mapping[str, Any]) -> bytes:
    """A line of JSON with its checksum; NaN and infinity become null."""
    text = json.dumps(finite(content)).encode().removesuffix(b"}")
    return text + _CHECKSUM + b'%08x"}\n' % zlib.crc32(text)


def refuse_unknown(step: int, record: Record, folder: str | Path) -> None:
    """A ConfigError for a step that a record does not have."""
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
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return str(value)
