"""Writes a run's record, `steps.jsonl` (run.record), on the main process.

Differs from transformers' `log_history`, which only checkpoints hold. Completions are in the files of TRL's
`log_completions`.
"""

import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..rollouts.rounds import ScoredBatch
from ..runtime.messages import logger
from .record import COPIED, STEPS, Line, line_of
from .trail import rollout_line

_PACKAGES = ("grpo_ext", "trl", "transformers", "accelerate", "torch", "peft", "datasets", "safetensors", "tokenizers")


def versions() -> dict[str, str | None]:
    installed: dict[str, str | None] = {"python": platform.python_version(), **dict.fromkeys(_PACKAGES)}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


class LineFile:
    """A file of JSON lines. Without a path, and after a failure, nothing is written."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def append(self, line: Line) -> None:
        if self.path is None:
            return
        with self.failing(), open(self.path, "ab") as file:
            file.write(line_of(line))

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Inside, an error ends the file with a warning, and not the run, in which other processes may be waiting."""
        try:
            yield
        except Exception as error:
            logger.warning(f"{self.path} cannot be written ({error}); the training continues without it.")
            self.path = None


class RunLog(LineFile):
    """Appends to a run's record. Before `begin`, after `end`, and on the other processes, nothing is written."""

    _trail = False
    _start = 0.0

    def begin(self, folder: str | Path, checkpoint: str | None, step: int, about: Line) -> None:
        """Note the start of a training call; rollouts and steps are noted too, unless `about` says trail=False.

        A last line that a kill has cut is removed; a resume in another folder takes the earlier lines along.
        """
        self.path, self._start = Path(folder) / STEPS, time.perf_counter()
        self._trail = about.get("trail", True)
        source = None if checkpoint is None else Path(checkpoint).parent / STEPS
        with self.failing():
            if self.path.is_file():
                os.truncate(self.path, len(_whole_lines(self.path)))
            if source is not None and source.parent.resolve() != self.path.parent.resolve():
                self.append({"line": COPIED, "step": 0, "from": str(source.parent)})
                with open(self.path, "ab") as file:
                    file.write(_whole_lines(source) if source.is_file() else b"")
        start = {"started": _now(), "resumed_from": checkpoint, "versions": versions(), **about}
        self.append({"line": "start", "step": step, **start})

    @property
    def writes_trail(self) -> bool:
        return self._trail and self.path is not None

    def rollout(self, step: int, sampled_by: int, scored: ScoredBatch) -> None:
        """Note a rollout batch: the first step that trains on it, from 1, and the step whose weights sampled it."""
        if self.writes_trail:
            with self.failing():
                self.append({"line": "rollout", "step": step, "sampled_by": sampled_by, **rollout_line(scored)})

    def step(self, step: int, values: Mapping[str, Any], weights: Mapping[str, Any] | None) -> None:
        """Note an optimizer step: its values, and where they are due the digests of the weights after it."""
        if self.writes_trail:
            digests = {} if weights is None else {"weights": weights}
            self.append({"line": "step", "step": step, "values": values, **digests})

    def write(self, step: int, epoch: float | None, values: Mapping[str, Any], device: torch.device) -> None:
        seconds = round(time.perf_counter() - self._start, 3)
        about = {"epoch": epoch, "time": seconds, "peak_memory_mib": peak_memory_mib(device)}
        others = {name: value for name, value in values.items() if name != "epoch"}
        self.append({"line": "log", "step": step, **about, "values": others})

    def end(self, step: int, about: Line) -> None:
        self.append({"line": "end", "step": step, "finished": _now(), **about})
        self.path = None


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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
