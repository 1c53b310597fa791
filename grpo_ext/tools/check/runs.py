"""Training runs in processes of their own: what `grpo-ext check` and the invariance tests compare.

A run trains a few steps from a given start and reports the parameter change and the log. Runs with the same number of
processes share one `Launch`, because importing the libraries takes longer than training a tiny model.
"""

from __future__ import annotations

import contextlib
import itertools
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
from typing import Any, Protocol

import psutil
import torch
import yaml
from peft import PeftConfig
from safetensors.torch import load_file

from ...errors import LaunchError
from ...rewards.worker import pack
from ..stock import OURS

POLL_S = 0.05  # between two looks for a file of the other side


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: unique among the runs of a launch.
        model_path: folder or id of the start, loaded in `dtype`; its tokenizer lies beside it.
        data_path: folder of the training set (`Dataset.save_to_disk`).
        rewards: reward functions, as for the trainer.
        config: keyword arguments of `grpo_ext.GRPOConfig`; `model_init_kwargs` in it apply, but for the type.
        trainer: "grpo_ext", or "trl" for stock TRL with the same settings.
        peft: None for full training.
        quantization: a `transformers.BitsAndBytesConfig`, or None.
        eval_path: folder of an evaluation set; evaluated once after training.
        dtype: "float32", or "float64" to tell wrong algebra from rounding.
        trace: hash every parameter and optimizer tensor after every step.
        gradients: file to write the gradients of every step to, as the optimizer is given them; None for none.
        resume_from: a checkpoint to go on from.
        rollout_func: as for the trainer.
        nameless: the model is handed over without a name to find it by again, as one built in memory.
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
        ours = self.trainer == OURS and self.config.get("float32_adapters", True)
        return self.half is None and (self.quantization is None or ours)

    @property
    def has_float64(self) -> bool:
        """Whether float64 can tell rounding from a difference; for half precision and quantised weights it cannot."""
        return self.half is None and self.quantization is None


@dataclass
class RunResult:
    """What came out of a run.

    Attributes:
        delta: parameters after minus before, per trainable parameter, float64.
        log: the Trainer's log lines.
        error: the message, where the run ended with one.
        seconds: wall time of training.
        trace: for each step, the hash of every parameter and optimizer tensor.
    """

    name: str
    delta: dict[str, torch.Tensor] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
    trace: list[dict[str, str]] = field(default_factory=list)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file that the other side sees whole or not at all."""
    beside = file.with_name(f"{file.name}.part")
    beside.write_bytes(content)
    beside.replace(file)


def free_port() -> int:
    """A TCP port that is free on this machine now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch_command(processes: int, folder: Path, script: Sequence[str]) -> list[str]:
    """The command line that starts `script` on `processes` processes through Accelerate's launcher.

    On a machine without enough accelerators the processes run on the CPU over gloo. `--cpu --num_processes N` would
    silently start one process; a configuration file with `MULTI_GPU` and `use_cpu` starts all of them.
    """
    if processes == 1:
        return [sys.executable, *script]
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "use_cpu": torch.cuda.device_count() < processes,
        "num_processes": processes,
        "num_machines": 1,
        "machine_rank": 0,
        "mixed_precision": "no",
        "main_process_port": free_port(),
    }
    path = folder / f"accelerate_{processes}.yaml"
    path.write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path), *script]


class Processes(Protocol):
    """The processes of a launch, from outside."""

    def status(self) -> int | None:
        """None while they run; 0 where all ended well."""

    def output(self) -> str:
        """What they printed so far, errors too."""

    def kill(self) -> None:
        """End every one that still runs."""


# starts the worker for a folder: (folder, processes, environment)
Starter = Callable[[Path, int, dict[str, str]], Processes]


class _Launched:
    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def status(self) -> int | None:
        return self._process.poll()

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        if self._process.poll() is not None:
            return
        # each process of a launcher has a session of its own, and outlives it
        for process in (*psutil.Process(self._process.pid).children(recursive=True), self._process):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


def launched(folder: Path, processes: int, environment: dict[str, str]) -> Processes:
    """A `Starter`: fresh interpreters, several of them through Accelerate's launcher."""
    command = launch_command(processes, folder, ["-m", "grpo_ext.tools.check.worker", str(folder)])
    return _Launched(command, environment, folder / "output.txt")


class Launch:
    """Processes that wait for runs and train them one after the other, until the `launch` that made it ends.

    Attributes:
        processes: how many.
    """

    def __init__(self, folder: Path, processes: int, started: Processes) -> None:
        self.processes, self._folder, self._started = processes, folder, started
        self._batches = itertools.count()

    def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Wait until every process has imported the libraries.

        Raises:
            LaunchError: the launch died or ran out of time; the end of its output is in the message.
        """
        files = [self._folder / f"ready_{rank}" for rank in range(self.processes)]
        for file in files:
            self._wait_for(file, f"the start of {self.processes} process(es)", timeout_s, timeout_s)

    def train(self, runs: Sequence[Run], timeout_s: float = 1800.0) -> Iterator[RunResult]:
        """Train every run, and give each result as soon as it is there.

        Raises:
            LaunchError: the launch died, or all runs took more than `timeout_s`; the end of its output is in the
                message.
        """
        batch = self._folder / f"batch_{next(self._batches)}"
        batch.mkdir()
        write_whole(batch / "runs.dill", pack(list(runs)))
        what, end = f"{len(runs)} run(s) on {self.processes} process(es)", time.monotonic() + timeout_s
        for run in runs:
            self._wait_for(batch / run.name / "result.json", what, end - time.monotonic(), timeout_s)
            yield read_result(batch / run.name, run.name)

    def end(self, patience_s: float = 90.0) -> None:
        """Let the processes end. Results are there: what takes longer is ended by `launch`.

        Raises:
            LaunchError: a process ended with an error.
        """
        write_whole(self._folder / "end", b"")
        until = time.monotonic() + patience_s
        while (status := self._started.status()) is None and time.monotonic() < until:
            time.sleep(POLL_S)
        if status:
            raise LaunchError(self._died(f"{self.processes} process(es)", status))

    def _wait_for(self, file: Path, what: str, left_s: float, timeout_s: float) -> None:
        until = time.monotonic() + left_s
        while not file.exists():
            # the file may have come between the look at it and the end
            if (status := self._started.status()) is not None and not file.exists():
                raise LaunchError(self._died(what, status))
            if time.monotonic() > until:
                self._started.kill()
                raise LaunchError(
                    f"{what} took more than {timeout_s:g} s; use fewer steps or splits. Last output:\n"
                    f"{self._started.output()[-800:]}"
                )
            time.sleep(POLL_S)

    def _died(self, what: str, status: int) -> str:
        reason = _first_error(self._folder) or f"Last output:\n{self._started.output()[-3000:]}"
        return f"{what} ended with status {status}. {reason}"


@contextlib.contextmanager
def launch(processes: int, offline: bool = False, start: Starter = launched) -> Iterator[Launch]:
    """Start processes that train what `Launch.train` hands them; none is left afterwards.

    Args:
        offline: the Hub is not asked for anything.
        start: how the processes come to be.

    Raises:
        LaunchError: a process ended with an error.
    """
    with tempfile.TemporaryDirectory(prefix="grpo_ext_runs_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "caller").write_text(str(os.getpid()))
        started = start(folder, processes, _environment(processes, offline))
        try:
            here = Launch(folder, processes, started)
            yield here
            here.end()
        finally:
            started.kill()


def run_all(
    runs: Sequence[Run], processes: int, timeout_s: float = 1800.0, start: Starter = launched
) -> list[RunResult]:
    """Train every run on `processes` real processes, one after the other in one launch.

    Args:
        start: how the processes come to be.

    Raises:
        LaunchError: the launch died or ran out of time; the end of its output is in the message.
    """
    with launch(processes, is_local(runs), start) as here:
        return list(here.train(runs, timeout_s))


def is_local(runs: Sequence[Run]) -> bool:
    """Whether the models of all runs are on the disk."""
    return all(Path(run.model_path).is_dir() for run in runs)


def _environment(processes: int, offline: bool) -> dict[str, str]:
    quiet = {"TOKENIZERS_PARALLELISM": "false", **({"HF_HUB_OFFLINE": "1"} if offline else {})}
    if processes > 1 and torch.cuda.device_count() < processes:
        quiet["ACCELERATE_USE_CPU"] = "true"  # the launcher does not pass its own use_cpu on for several processes
    # the same number of threads for every launch: matrix products sum in another order otherwise
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **quiet}


def _first_error(folder: Path) -> str:
    """The error of the process that failed first; the others fail because it is gone."""
    errors = sorted(folder.glob("error_*.txt"), key=lambda path: path.stat().st_mtime)
    return errors[0].read_text()[:3000] if errors else ""


def read_result(folder: Path, name: str) -> RunResult:
    """Take what the worker wrote for one run; its tensors do not stay on the disk."""
    meta = json.loads((folder / "result.json").read_text())
    file = folder / "delta.safetensors"
    delta = load_file(file) if file.exists() else {}
    file.unlink(missing_ok=True)
    return RunResult(name, delta, meta["log"], meta["error"], meta["seconds"], meta.get("trace", []))
