"""`log.jsonl` in a run's folder: the start of each training call, every log line, the end of the call.

Differs from transformers' `log_history`, which only checkpoints hold. A line has "step" and one of "start" (settings,
versions and data), "values" and "end". Completions are in the files of TRL's `log_completions`. Written on the main
process; read by `grpo-ext report`.
"""

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger

LOG = "log.jsonl"
_PACKAGES = ("grpo_ext", "trl", "transformers", "accelerate", "torch", "peft", "datasets", "safetensors", "tokenizers")

logger = get_logger(__name__)


def versions() -> dict[str, str | None]:
    installed: dict[str, str | None] = {"python": platform.python_version(), **dict.fromkeys(_PACKAGES)}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


class LineFile:
    """A file of JSON lines in a run's folder. Before `begin`, and after a failure, nothing is written."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what = name, what
        self.path: Path | None = None

    def begin(self, folder: str | Path, checkpoint: str | None) -> None:
        """Remove a last line that a kill left unfinished; a resume in another folder takes the earlier lines along."""
        self.path = Path(folder) / self.name
        earlier = None if checkpoint is None else Path(checkpoint).resolve().parent / self.name
        with self.failing():
            if self.path.is_file():
                os.truncate(self.path, len(_whole_lines(self.path)))
            if earlier is not None and earlier.is_file() and earlier != self.path.resolve():
                with open(self.path, "ab") as file:
                    file.write(_whole_lines(earlier))

    def append(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        with self.failing(), open(self.path, "ab") as file:
            file.write(json.dumps(finite(line)).encode() + b"\n")

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Inside, an error ends the file with a warning, and not the run, in which other processes may be waiting."""
        try:
            yield
        except Exception as error:
            logger.warning(f"{self.path} cannot be written ({error}); the training continues without a {self.what}.")
            self.path = None


def finite(value: Any) -> Any:
    """A value in JSON's types, with None for NaN and infinity."""
    return json.loads(json.dumps(value, default=_plain), parse_constant=lambda name: None)


def json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """The lines of a file and their numbers, from 1, without those that a kill has cut."""
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            yield number, line


class RunLog:
    """Appends to a run's log, on the main process."""

    def __init__(self) -> None:
        self._file = LineFile(LOG, "run log")
        self._start = 0.0

    def begin(self, folder: str | Path, checkpoint: str | None, step: int, about: Mapping[str, Any]) -> None:
        """Start the log of a training call. A start at step 0 supersedes all lines before it."""
        self._start = time.perf_counter()
        self._file.begin(folder, checkpoint)
        start = {"started": _now(), "resumed_from": checkpoint, "versions": versions(), **about}
        self._file.append({"step": step, "start": start})

    def write(self, step: int, epoch: float | None, values: Mapping[str, Any], device: torch.device) -> None:
        seconds = round(time.perf_counter() - self._start, 3)
        line = {"step": step, "epoch": epoch, "time": seconds, "peak_memory_mib": peak_memory_mib(device)}
        self._file.append(line | {"values": {name: value for name, value in values.items() if name != "epoch"}})

    def end(self, step: int, about: Mapping[str, Any]) -> None:
        self._file.append({"step": step, "end": {"finished": _now(), **about}})


@dataclass
class LoggedRun:
    """A log without the lines that a later start supersedes, oldest first."""

    # one for each training call, with "ended" and the last "step" where the call has ended
    starts: list[dict[str, Any]] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)  # each has step, epoch, time and values
    resumed_from: list[int] = field(default_factory=list)  # steps
    seconds: float = 0.0  # spent in training calls, superseded steps included


def read_log(path: str | Path) -> LoggedRun:
    """The log of a run, which may still be running."""
    run, seconds, before = LoggedRun(), 0.0, 0  # seconds of the training call so far, and entries before it
    for _, line in json_lines(path):
        try:
            step = int(line["step"])
        except (ValueError, TypeError, KeyError):
            continue
        if "values" in line:
            run.entries.append(line)
            run.seconds += line["time"] - seconds
            seconds = line["time"]
        elif "start" in line:
            seconds = 0.0
            if step == 0:  # a new run in the same folder
                run = LoggedRun()
            else:
                if run.resumed_from[-1:] == [step]:
                    del run.entries[before:]  # what that start logged of this step too
                run.entries = [entry for entry in run.entries if entry["step"] <= step]
                run.resumed_from.append(step)
            before = len(run.entries)
            run.starts.append(line["start"])
        elif "end" in line and run.starts:
            run.starts[-1] |= {"step": step, **line["end"]}
    return run


def peak_memory_mib(device: torch.device) -> float | None:
    """Peak memory in MiB: allocated on the accelerator, or resident in this process; None where it is unknown."""
    try:
        if device.type != "cpu":
            return torch.accelerator.max_memory_allocated(device) / 2**20
        import resource
    except (RuntimeError, ValueError, ImportError):  # an accelerator that does not count; Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _plain(value: Any) -> Any:
    """A value for JSON: a tensor of one number as that number, other objects as text."""
    if value is None or isinstance(value, (str, int)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return str(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
