"""Training runs in processes of their own: what `grpo-ext check` and the invariance tests compare.

A run trains a few steps from a given start and reports the parameter change and the log. Runs on the same number of
processes share a launch, because importing the libraries takes longer than training a tiny model.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftConfig
from safetensors.torch import load_file

from ...errors import LaunchError
from ...rewards.worker import pack
from ..stock import OURS

POLL_S = 0.05
EXIT_S = 90.0  # until processes that hang at their exit are killed; their results are there


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: unique among the runs of a launch.
        model_path: folder or id of the initial model, loaded in `dtype`, with its tokenizer.
        data_path: folder of the training set (`Dataset.save_to_disk`).
        rewards: reward functions, as for the trainer.
        config: keyword arguments of `grpo_ext.GRPOConfig`; `model_init_kwargs` in it apply, except the dtype.
        trainer: "grpo_ext", or "trl" for stock TRL with the same settings.
        peft: None for full training.
        quantization: a `transformers.BitsAndBytesConfig`, or None.
        eval_path: folder of an evaluation set; evaluated once after training.
        dtype: "float32", or "float64" to tell wrong algebra from rounding.
        trace: hash every parameter and optimizer tensor after every step.
        gradients: file for the gradients of every step, as the optimizer gets them; None for none.
        resume_from: a checkpoint to resume from.
        rollout_func: as for the trainer.
        nameless: clear the model's name, as for a model built in memory.
    """

    name: str
    model_path: str
    data_path: str
    rewards: tuple[Any, ...]
    config: dict[str, Any]
    trainer: str = OURS
    peft: PeftConfig | None = None
    quantization: Any = None
    eval_path: str | None = None
    dtype: str = "float32"
    trace: bool = False
    gradients: Path | None = None
    resume_from: str | None = None
    rollout_func: Any = None
    nameless: bool = False

    @property
    def half(self) -> str | None:
        """The half precision that the settings name: "bf16", "fp16" or None."""
        return next((name for name in ("bf16", "fp16") if self.config.get(name)), None)

    @property
    def in_float32(self) -> bool:
        """Whether it computes and trains in float32; TRL's adapters of quantised weights are bfloat16."""
        return self.half is None and (self.quantization is None or self.trainer == OURS)

    @property
    def has_float64(self) -> bool:
        """Whether the same run exists in float64; half precision and quantised weights have none."""
        return self.half is None and self.quantization is None


@dataclass
class RunResult:
    """The outcome of a run.

    Attributes:
        delta: parameters after minus before, per trainable parameter, float64.
        log: the Trainer's log lines.
        error: the message, where the run ended with one.
        trace: for each step, the hash of every parameter and optimizer tensor.
        gradients: a file with the gradients of the same run that did not learn, where a check had one.
    """

    name: str
    delta: dict[str, torch.Tensor] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    trace: list[dict[str, str]] = field(default_factory=list)
    gradients: Path | None = None


def free_port() -> int:
    """A TCP port that is free on this machine now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch_command(processes: int, script: Sequence[str]) -> list[str]:
    """The command line that starts `script` on `processes` processes.

    Not `accelerate launch`, which has the defaults of a configuration file of the user's.
    """
    if processes == 1:
        return [sys.executable, *script]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return [*torchrun, "--master-port", str(free_port()), *script]


class Processes:
    """The processes of a launch; what they print goes into a file."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def status(self) -> int | None:
        """The exit status; None while they run."""
        return self._process.poll()

    def output(self) -> str:
        """What they printed so far, errors included."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill every process that still runs."""
        if self._process.poll() is not None:
            return
        # each process of a launcher has a session of its own, and outlives it
        for process in (*psutil.Process(self._process.pid).children(recursive=True), self._process):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


# starts the worker: (folder, processes, environment)
Starter = Callable[[Path, int, dict[str, str]], Processes]


def launched(folder: Path, processes: int, environment: dict[str, str]) -> Processes:
    """A `Starter`: fresh interpreters, several of them through torch's launcher."""
    command = launch_command(processes, ["-m", "grpo_ext.tools.check.worker", str(folder), str(os.getpid())])
    return Processes(command, environment, folder / "output.txt")


def train(
    runs: Sequence[Run], processes: int, timeout_s: float = 1800.0, start: Starter = launched
) -> Iterator[RunResult]:
    """Train every run on `processes` real processes, one after the other; yield each result as soon as it exists.

    Raises:
        LaunchError: a process ended with an error, or a run took more than `timeout_s`; the message has the error or
            the end of the output.
    """
    what = f"{len(runs)} run(s) on {processes} process(es)"
    with tempfile.TemporaryDirectory(prefix="grpo_ext_runs_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "runs.pickle").write_bytes(pack(list(runs)))
        started = start(folder, processes, _environment(runs, processes))
        try:
            for run in runs:
                _wait_for(folder / run.name / "result.json", started, what, timeout_s)
                yield _read_result(folder / run.name)
            end = time.monotonic() + EXIT_S
            while (status := started.status()) is None and time.monotonic() < end:
                time.sleep(POLL_S)
            if status:
                raise LaunchError(f"{what} ended with status {status}. {_reason(folder, started)}")
        finally:
            started.kill()


def _wait_for(result: Path, started: Processes, what: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not result.exists():
        # the file may appear between the first look and the end of the process
        if (status := started.status()) is not None and not result.exists():
            raise LaunchError(f"{what} ended with status {status}. {_reason(result.parents[1], started)}")
        if time.monotonic() > end:
            started.kill()
            last = started.output()[-800:]
            raise LaunchError(f"{what}: one took more than {timeout_s:g} s; use fewer steps. Last output:\n{last}")
        time.sleep(POLL_S)


def _environment(runs: Sequence[Run], processes: int) -> dict[str, str]:
    # the same number of threads for every launch: matrix products sum in another order otherwise
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    if all(Path(run.model_path).is_dir() for run in runs):
        environment["HF_HUB_OFFLINE"] = "1"
    if processes > 1 and torch.cuda.device_count() < processes:
        environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def _reason(folder: Path, started: Processes) -> str:
    """The error of the process that failed first; the others fail because it has ended."""
    errors = sorted(folder.glob("error_*.txt"), key=lambda path: path.stat().st_mtime)
    return errors[0].read_text()[:3000] if errors else f"Last output:\n{started.output()[-3000:]}"


def _read_result(folder: Path) -> RunResult:
    """The files of one run; its tensors do not stay on the disk."""
    file = folder / "delta.safetensors"
    delta = load_file(file) if file.exists() else {}
    file.unlink(missing_ok=True)
    return RunResult(folder.name, delta, **json.loads((folder / "result.json").read_text()))
