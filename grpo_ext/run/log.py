"""`log.jsonl` in a run's folder: every log line as it is made.

Differs from transformers' `log_history`, which only checkpoints hold. Completions are in the files of TRL's
`log_completions`. Written on the main process; read by
`grpo-ext report`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

LOG = "log.jsonl"

logger = get_logger(__name__)


class RunLog:
    """Appends to a run's log. Before `begin`, and on the other processes, nothing is written."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._start = 0.0

    def begin(self, folder: str | Path, checkpoint: str | None) -> None:
        """Start the log of a training call.

        A log that another run left in the folder is renamed (`log-1.jsonl`). A run that resumes from a checkpoint of
        another folder starts with a copy of the log there.

        Args:
            checkpoint: the checkpoint that the run resumes from, or None.
        """
        root = Path(folder)
        self.path, self._start = root / LOG, time.perf_counter()
        earlier = None if checkpoint is None else Path(checkpoint).resolve().parent / LOG
        try:
            root.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.resolve() != earlier:
                os.replace(self.path, next(p for i in count(1) if not (p := root / f"log-{i}.jsonl").exists()))
            if earlier is not None and earlier.is_file() and not self.path.exists():
                shutil.copy(earlier, self.path)
            with open(self.path, "a+b") as file:
                if file.tell() and not self.path.read_bytes().endswith(b"\n"):  # a kill has cut the last line
                    file.write(b"\n")
        except OSError as error:
            self._give_up(error)
        if checkpoint is not None:
            state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
            self._append({"resumed_from": state.global_step})

    def write(self, step: int, epoch: float | None, values: Mapping[str, Any], device: torch.device) -> None:
        """Append one line.

        Args:
            step: optimizer steps done.
            epoch: passes over the training set done.
            values: what was logged, by name; a number that is not finite is written as null.
            device: of the model; memory is that of the accelerator, or of the process on a CPU.
        """
        self._append(
            {
                "step": step,
                "epoch": epoch,
                "time": round(time.perf_counter() - self._start, 3),
                "peak_memory_mib": peak_memory_mib(device),
                "memory_of": "process" if device.type == "cpu" else "accelerator",
                "values": {name: value for name, value in values.items() if name != "epoch"},
            }
        )

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(strict(line), allow_nan=False) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning(f"{self.path} cannot be written ({error}); the training continues without a run log.")
        self.path = None


@dataclass
class LoggedRun:
    """A log without the lines that a resume has superseded.

    Attributes:
        entries: log lines, oldest first; each has step, epoch, time and values.
        resumed_from: the steps that were resumed from.
        seconds: spent in training calls, superseded steps included.
        unreadable: lines that are not JSON; a kill in the middle of a write leaves one.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)
    seconds: float = 0.0
    unreadable: int = 0


def read_log(path: str | Path) -> LoggedRun:
    """Read the log of a run, which may still be running.

    Raises:
        OSError: the file cannot be read.
    """
    run, last_time = LoggedRun(), 0.0
    with open(path, "rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
                resumed = "resumed_from" in line
                step = int(line["resumed_from" if resumed else "step"])
                if not resumed and not isinstance(line["values"], dict):
                    raise TypeError
            except (ValueError, TypeError, KeyError):
                run.unreadable += bool(raw.strip())
                continue
            if resumed:
                run.entries = [entry for entry in run.entries if entry["step"] <= step]
                run.resumed_from.append(step)
                run.seconds, last_time = run.seconds + last_time, 0.0
            else:
                run.entries.append(line)
                last_time = float(line.get("time") or 0.0)
    run.seconds += last_time
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


def strict(value: Any) -> Any:
    """A value as strict JSON: NaN and infinities become None, unknown objects their text."""
    if isinstance(value, Mapping):
        return {str(name): strict(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(part) for part in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)
    return number if math.isfinite(number) else None
