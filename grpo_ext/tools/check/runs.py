"""Training runs in processes of their own: what `grpo-ext check` and the invariance tests compare.

A run trains a few steps from a given start and reports the parameter change and the log. Runs with the same number of
processes share one launch, because importing the libraries takes longer than training a tiny model.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftConfig
from safetensors.torch import load_file

from ...errors import LaunchError
from ...rewards.worker import pack
from ..stock import OURS


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


# starts the worker on the runs of a folder: (folder, processes, environment, seconds) to (status, output), and a status
# of None where the time was over; no process may be left in either case
Starter = Callable[[Path, int, dict[str, str], float], tuple[int | None, str]]


def launched(folder: Path, processes: int, environment: dict[str, str], timeout_s: float) -> tuple[int | None, str]:
    """A `Starter`: fresh interpreters, several of them through Accelerate's launcher."""
    command = launch_command(processes, folder, ["-m", "grpo_ext.tools.check.worker", str(folder)])
    return _finish(command, environment, timeout_s)


def run_all(
    runs: Sequence[Run], processes: int, timeout_s: float = 1800.0, start: Starter = launched
) -> list[RunResult]:
    """Train every run on `processes` real processes, one after the other in one launch.

    Args:
        start: how the processes come to be.

    Raises:
        LaunchError: the launch died or ran out of time; the end of its output is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="grpo_ext_runs_") as name:
        folder = Path(name)
        (folder / "runs.dill").write_bytes(pack(list(runs)))
        status, output = start(folder, processes, _environment(runs, processes), timeout_s)
        if status is None:
            raise LaunchError(
                f"{len(runs)} run(s) on {processes} process(es) took more than {timeout_s:g} s; use fewer steps or "
                f"splits. Last output:\n{output[-800:]}"
            )
        if status != 0:
            raise LaunchError(
                f"{len(runs)} run(s) on {processes} process(es) ended with status {status}. "
                + (_first_error(folder) or f"Last output:\n{output[-3000:]}")
            )
        return [read_result(folder / run.name, run.name) for run in runs]


def _environment(runs: Sequence[Run], processes: int) -> dict[str, str]:
    quiet = {"TOKENIZERS_PARALLELISM": "false"}
    if all(Path(run.model_path).is_dir() for run in runs):
        quiet["HF_HUB_OFFLINE"] = "1"  # everything is on the disk
    if processes > 1 and torch.cuda.device_count() < processes:
        quiet["ACCELERATE_USE_CPU"] = "true"  # the launcher does not pass its own use_cpu on for several processes
    # the same number of threads for every launch: matrix products sum in another order otherwise
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **quiet}


def _first_error(folder: Path) -> str:
    """The error of the process that failed first; the others fail because it is gone."""
    errors = sorted(folder.glob("error_*.txt"), key=lambda path: path.stat().st_mtime)
    return errors[0].read_text()[:3000] if errors else ""


def _finish(command: Sequence[str], env: dict[str, str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status and output of a command; None after `timeout_s`, with every process it had started ended."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as p:
        try:
            output, _ = p.communicate(timeout=timeout_s)
            return p.returncode, output
        except BaseException as error:  # a launcher's processes outlive it, also on Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            output, _ = p.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return None, output
            raise


def read_result(folder: Path, name: str) -> RunResult:
    """Read what `run_worker` wrote for one run."""
    meta = json.loads((folder / "result.json").read_text())
    delta = load_file(folder / "delta.safetensors") if (folder / "delta.safetensors").exists() else {}
    return RunResult(name, delta, meta["log"], meta["error"], meta["seconds"], meta.get("trace", []))
