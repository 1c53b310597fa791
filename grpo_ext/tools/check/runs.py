"""Training runs in separate processes, which `grpo-ext check` and the invariance tests compare.

A run trains a few steps from a saved model into its folder, and reports the parameter change. Runs on the same number
of processes share a launch, because importing the libraries takes longer than training a tiny model.
"""

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.other import get_free_port
from peft import PeftConfig

from ...errors import LaunchError, counted
from ...rewards.worker import pack
from ..stock import OURS

WORKER = "grpo_ext.tools.check.worker"
OUTPUT, RUNS = "output.txt", "runs.pickle"  # in the folder of a launch: what its processes print, what they train


@dataclass(frozen=True)
class Run:
    """One training run; `rewards` and `rollout_func` are those of the trainer."""

    name: str  # unique among the runs of a launch
    model_path: str  # folder or id of the initial model, loaded in float32, with its tokenizer
    data_path: str  # folder of the training set (`Dataset.save_to_disk`)
    rewards: tuple[Any, ...]
    config: dict[str, Any]  # keyword arguments of `grpo_ext.GRPOConfig`, `model_init_kwargs` included
    trainer: str = OURS  # or STOCK: TRL's trainer with the same settings
    peft: PeftConfig | None = None  # None: full training
    quantization: Any = None  # a `transformers.BitsAndBytesConfig`
    trace: bool = False  # hash every parameter and optimizer tensor after every step; no `gradients` then
    resume_from: str | None = None  # a checkpoint
    rollout_func: Any = None

    @property
    def half(self) -> str | None:
        """The half precision that the settings name: "bf16", "fp16" or None."""
        return next((name for name in ("bf16", "fp16") if self.config.get(name)), None)


@dataclass
class RunResult:
    name: str
    folder: str = ""  # with the run's record; by default in that of the launch
    delta: dict[str, torch.Tensor] = field(default_factory=dict)  # trained parameters after minus before, float64
    error: str | None = None  # the message, if the run ended with an error
    trace: list[dict[str, str]] = field(default_factory=list)  # the hash of every tensor, by step
    # the first gradient that is not zero, as the optimizer gets it
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


# starts a process with `kill()` and `wait()`, from the folder of the launch, an environment and its end of the pipe
Starter = Callable[[Path, dict[str, str], Connection], Any]


def launched(folder: Path, environment: dict[str, str], pipe: Connection, worker: str = WORKER) -> Any:
    """Start a fresh interpreter that Ctrl-C does not reach (a `Starter`)."""
    command = [sys.executable, "-m", worker, str(folder), str(pipe.fileno())]
    with (folder / OUTPUT).open("ab") as output:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "pass_fds": [pipe.fileno()]}
        return subprocess.Popen(command, env=environment, start_new_session=True, **streams)


def train(
    runs: Sequence[Run], processes: int, timeout_s: float = 1800.0, start: Starter = launched
) -> Iterator[RunResult]:
    """Train every run on `processes` real processes, one after the other; yield each result as soon as it exists.

    A LaunchError, with the error or the end of the output, if a process ended or a run took over `timeout_s`.
    """
    what = f"{counted(len(runs), 'run')} on {counted(processes, 'process')}"
    with tempfile.TemporaryDirectory(prefix="grpo_ext_runs_", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder = Path(name)
        (folder / RUNS).write_bytes(pack(list(runs)))
        # not Accelerate's launcher, which takes defaults from the user's configuration file
        environments = ranked(_environment(runs, processes), processes)

        def failed(how: str) -> LaunchError:
            output = (folder / OUTPUT).read_text(errors="replace")[-3000:]
            return LaunchError(f"{what}{how}. Last output:\n{output}")

        workers = dict(stack.enter_context(_worker(folder, environment, start)) for environment in environments)
        while workers:
            ready: list[Any] = wait([*workers], timeout_s)
            if not ready:
                raise failed(f": one took more than {timeout_s:g} s; use fewer steps")
            for pipe in ready:
                try:
                    message = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    status = workers[pipe].wait()
                    raise failed(f" ended with status {status}") from None
                if isinstance(message, RunResult):
                    yield message
                elif message is None:  # all runs are trained
                    del workers[pipe]
                else:
                    raise LaunchError(f"{what} ended with an error. {message}")


@contextlib.contextmanager
def _worker(folder: Path, environment: dict[str, str], start: Starter) -> Iterator[tuple[Connection, Any]]:
    """A process and this end of its pipe; the process ends with the context, or with this process."""
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
    """The environment of each process, as torch's launcher sets it; a single process needs none."""
    if processes == 1:
        return [environment]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    return [{**environment, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def on_cpus(processes: int) -> dict[str, str]:
    """The variable by which Accelerate joins processes on CPUs, where there are fewer GPUs than processes."""
    return {"ACCELERATE_USE_CPU": "true"} if processes > 1 and torch.cuda.device_count() < processes else {}


def _environment(runs: Sequence[Run], processes: int) -> dict[str, str]:
    # the same number of threads in every launch: it determines the order of sums in matrix products
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    if all(Path(run.model_path).is_dir() for run in runs):
        environment["HF_HUB_OFFLINE"] = "1"
    return environment | on_cpus(processes)
