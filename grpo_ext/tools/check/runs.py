"""Training runs in separate processes, which `grpo-ext check` and the invariance tests compare.

A run trains a few steps from a saved model and reports the parameter change and the log. Runs on the same number of
processes share a launch, because importing the libraries takes longer than training a tiny model.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.other import get_free_port
from peft import PeftConfig

from ...errors import LaunchError
from ...rewards.worker import pack
from ..stock import OURS

WORKER = "grpo_ext.tools.check.worker"
OUTPUT, RUNS = "output.txt", "runs.pickle"  # in the folder of a launch: what its processes print, what they train


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: unique among the runs of a launch.
        model_path: folder or id of the initial model, loaded in float32, with its tokenizer.
        data_path: folder of the training set (`Dataset.save_to_disk`).
        rewards: reward functions, as for the trainer.
        config: keyword arguments of `grpo_ext.GRPOConfig`; `model_init_kwargs` in it apply.
        trainer: "grpo_ext", or "trl" for stock TRL with the same settings.
        peft: None for full training.
        quantization: a `transformers.BitsAndBytesConfig`, or None.
        eval_path: folder of an evaluation set; evaluated once after training.
        trace: hash every parameter and optimizer tensor after every step.
        gradients: return the first gradient that is not zero.
        resume_from: a checkpoint to resume from.
        rollout_func: as for the trainer.
        nameless: clear the model's name, as for a model built in memory.
        within: from the model to a context in which it is trained.
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
    trace: bool = False
    gradients: bool = False
    resume_from: str | None = None
    rollout_func: Any = None
    nameless: bool = False
    within: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext

    @property
    def half(self) -> str | None:
        """The half precision that the settings name: "bf16", "fp16" or None."""
        return next((name for name in ("bf16", "fp16") if self.config.get(name)), None)

    @property
    def in_float32(self) -> bool:
        """Whether it computes and trains in float32; TRL's adapters of quantised weights are bfloat16."""
        return self.half is None and (self.quantization is None or self.trainer == OURS)


@dataclass
class RunResult:
    """The outcome of a run.

    Attributes:
        delta: parameters after minus before, per trainable parameter, float64.
        log: the Trainer's log lines.
        error: the message, where the run ended with one.
        trace: for each step, the hash of every parameter and optimizer tensor.
        gradients: per parameter, of the first step with a gradient that is not zero, as the optimizer gets it.
    """

    name: str
    delta: dict[str, torch.Tensor] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    trace: list[dict[str, str]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


# starts a worker that has `kill()` and `wait()`: (folder of the launch, environment, the worker's end of its pipe)
Starter = Callable[[Path, dict[str, str], Connection], Any]


def launched(folder: Path, environment: dict[str, str], pipe: Connection) -> Any:
    """A `Starter`: a fresh interpreter, which Ctrl-C does not reach."""
    with (folder / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", WORKER, str(folder), str(pipe.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[pipe.fileno()],
            start_new_session=True,
        )


def train(
    runs: Sequence[Run], processes: int, timeout_s: float = 1800.0, start: Starter = launched
) -> Iterator[RunResult]:
    """Train every run on `processes` real processes, one after the other; yield each result as soon as it exists.

    Raises:
        LaunchError: a process ended or had an error, or a run took more than `timeout_s`; the message has the error or
            the end of the output.
    """
    what = f"{len(runs)} run(s) on {processes} process(es)"
    with tempfile.TemporaryDirectory(prefix="grpo_ext_runs_", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder = Path(name)
        (folder / RUNS).write_bytes(pack(list(runs)))
        # no launcher of Accelerate's, which has the defaults of a configuration file of the user's
        environments = ranked(_environment(runs, processes), processes)
        workers = dict(stack.enter_context(_worker(folder, environment, start)) for environment in environments)
        while workers:
            ready: list[Any] = wait([*workers], timeout_s)
            if not ready:
                late = f"{what}: one took more than {timeout_s:g} s; use fewer steps."
                raise LaunchError(f"{late} {_last_output(folder)}")
            for pipe in ready:
                try:
                    message = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    status = workers[pipe].wait()
                    raise LaunchError(f"{what} ended with status {status}. {_last_output(folder)}") from None
                if isinstance(message, RunResult):
                    yield message
                elif message is None:  # it has trained all runs
                    del workers[pipe]
                else:
                    raise LaunchError(f"{what} ended with an error. {message}")


@contextlib.contextmanager
def _worker(folder: Path, environment: dict[str, str], start: Starter) -> Iterator[tuple[Connection, Any]]:
    """A process and this end of its pipe; it ends with the context, or with this process."""
    here, there = multiprocessing.Pipe()
    with here:
        with there:
            process = start(folder, environment, there)
        try:
            yield here, process
        finally:
            process.kill()
            process.wait()


def ranked(environment: dict[str, str], processes: int) -> list[dict[str, str]]:
    """The environment of each process, as torch's launcher sets it; a single process has no launcher."""
    if processes == 1:
        return [environment]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    return [{**environment, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _environment(runs: Sequence[Run], processes: int) -> dict[str, str]:
    # the same number of threads for every launch: matrix products sum in another order otherwise
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    if all(Path(run.model_path).is_dir() for run in runs):
        environment["HF_HUB_OFFLINE"] = "1"
    if processes > 1 and torch.cuda.device_count() < processes:
        environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def _last_output(folder: Path) -> str:
    return f"Last output:\n{(folder / OUTPUT).read_text(errors='replace')[-3000:]}"
