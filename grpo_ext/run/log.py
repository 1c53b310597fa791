"""`log.jsonl` in a run's folder: every log line as it is made, with the best and worst completions.

Differs from transformers' `log_history`, which only checkpoints hold. Written on the main process; read by
`grpo-ext report`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

LOG = "log.jsonl"
LONGEST_TEXT = 4000  # characters
SHOWN = 2  # completions, best and as many worst, of a log line

logger = get_logger(__name__)


class RunLog:
    """Appends to a run's log. Before `begin`, and on the other processes, nothing is written."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._start = 0.0
        self._last: Any = None  # the newest row that was read, by identity
        self._of_training: list[dict[str, Any]] = []  # for the next line of training

    def begin(self, folder: str | Path, checkpoint: str | None) -> None:
        """Start the log of a training call.

        A log that another run left in the folder is renamed (`log-1.jsonl`). A run that resumes from a checkpoint of
        another folder starts with a copy of the log there.

        Args:
            checkpoint: the checkpoint that the run resumes from, or None.
        """
        root = Path(folder)
        self.path, self._start, self._of_training = root / LOG, time.perf_counter(), []
        earlier = None if checkpoint is None else Path(checkpoint).resolve().parent / LOG
        try:
            root.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.resolve() != earlier:
                os.replace(self.path, next(p for i in count(1) if not (p := root / f"log-{i}.jsonl").exists()))
            if earlier is not None and earlier.is_file() and not self.path.exists():
                shutil.copy(earlier, self.path)
            self.path.touch()
        except OSError as error:
            self._give_up(error)
        if checkpoint is not None:
            state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
            self._append({"resumed_from": state.global_step})

    def collect(self, rows: Mapping[str, Any], weights: Sequence[float]) -> None:
        """Read the completions of a training step, before an evaluation adds its own to the same rows."""
        new = self._new(rows, weights)
        if self.path is not None:
            self._of_training = extremes([*self._of_training, *new])

    def write(
        self,
        step: int,
        epoch: float | None,
        values: Mapping[str, Any],
        rows: Mapping[str, Any],
        weights: Sequence[float],
        device: torch.device,
    ) -> None:
        """Append one line.

        Args:
            step: optimizer steps done.
            epoch: passes over the training set done.
            values: what was logged, by name; a number that is not finite is written as null.
            rows: TRL's record of the last rollout batch: prompt, completion, advantages, and rewards by name; with the
                gold answers, where there are any.
            weights: of the reward functions.
            device: of the model; memory is that of the accelerator, or of the process on a CPU.
        """
        shown = self._new(rows, weights)
        if not is_evaluation(values) and "train_runtime" not in values:
            shown, self._of_training = extremes([*self._of_training, *shown]), []
        best = shown[: min(SHOWN, (len(shown) + 1) // 2)]
        self._append(
            {
                "step": step,
                "epoch": epoch,
                "time": round(time.perf_counter() - self._start, 3),
                "peak_memory_mib": peak_memory_mib(device),
                "memory_of": "process" if device.type == "cpu" else "accelerator",
                "values": {name: value for name, value in values.items() if name != "epoch"},
                "best": best,
                "worst": shown[len(best) :][::-1],
            }
        )

    def _new(self, rows: Mapping[str, Any], weights: Sequence[float]) -> list[dict[str, Any]]:
        """The extremes of the rows since the last call; none while a rollout batch is trained on again."""
        marks = list(rows["advantages"])  # every row has a float object of its own
        first = 1 + max((i for i, mark in enumerate(marks) if mark is self._last), default=-1)
        self._last = marks[-1] if marks else self._last
        rewards = {name: list(values)[first:] for name, values in rows["rewards"].items()}
        golds = list(rows.get("gold", ()))
        if len(golds) != len(marks):  # rows that were scored outside a rollout batch are among them
            golds = [None] * len(marks)
        texts = zip(list(rows["prompt"])[first:], list(rows["completion"])[first:], golds[first:])
        new = []
        for i, (prompt, completion, gold) in enumerate(texts):
            by_name = {name: strict(values[i]) for name, values in rewards.items()}
            weighted = [weight * value for weight, value in zip(weights, by_name.values()) if value is not None]
            if weighted:
                text = {"prompt": cut(as_text(prompt)), "completion": cut(as_text(completion))}
                text |= {} if gold is None else {"gold": cut(as_text(gold))}
                new.append({**text, "reward": math.fsum(weighted), "rewards": by_name})
        return extremes(new)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        text = json.dumps(strict(line), allow_nan=False)
        try:
            with open(self.path, "a+b") as file:  # writes at the end, wherever it reads
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    text = text if file.read(1) == b"\n" else f"\n{text}"  # a kill may have cut the last line
                file.write(f"{text}\n".encode())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning(f"{self.path} cannot be written ({error}); the training continues without a run log.")
        self.path = None


@dataclass
class LoggedRun:
    """A log without the lines that a resume has superseded.

    Attributes:
        entries: log lines, oldest first; each has step, epoch, time, values, best and worst.
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


def is_evaluation(values: Iterable[str]) -> bool:
    """Whether the names of a log line are those of an evaluation."""
    return any(name.startswith("eval_") for name in values)


def extremes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best and the worst `SHOWN` rows by reward, best first; no text twice."""
    distinct = {(row["prompt"], row["completion"]): row for row in rows}
    ordered = sorted(distinct.values(), key=lambda row: -row["reward"])
    return ordered if len(ordered) <= 2 * SHOWN else [*ordered[:SHOWN], *ordered[-SHOWN:]]


def peak_memory_mib(device: torch.device) -> float | None:
    """Peak memory in MiB: allocated on the accelerator, or resident in this process; None where it is unknown."""
    try:
        if device.type != "cpu":
            return torch.accelerator.max_memory_allocated(device) / 2**20
        import resource
    except (RuntimeError, ValueError, ImportError):  # an accelerator that does not count; Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def as_text(content: Any) -> str:
    """A prompt or completion as text; messages become lines of `role: content`, with tool calls as JSON."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(_message(part) if isinstance(part, Mapping) else str(part) for part in content)
    return str(content)


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content") or []
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = [p.get("text") or f"[{p.get('type')}]" if isinstance(p, Mapping) else p for p in parts]
    calls = [json.dumps(strict(call)) for call in message.get("tool_calls") or ()]
    speaker = " ".join(str(message[key]) for key in ("role", "name") if message.get(key))
    return f"{speaker}: {' '.join(map(str, [*texts, *calls]))}"


def cut(text: str, longest: int = LONGEST_TEXT) -> str:
    """Shorten a text to about `longest` characters: the first three quarters and the end, with a mark between."""
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end]} [... {len(text) - longest} characters cut ...] {text[-end:]}"


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
