"""Launches whose processes are forked from a server that has imported everything: they start at once.

Importing torch, transformers, TRL and DeepSpeed takes a process ten seconds and more, training a tiny model one or two.
The fork server of `multiprocessing` imports them once (tests.support.preload) and computes nothing, so what it forks is
as a fresh interpreter after its imports: no state of Accelerate, no thread of torch, no random number drawn. A process
gets the environment, the arguments and the `__main__` that Accelerate's launcher would have given it (torchrun's, under
it), and a launch ends as there: where one process fails, the others are told to end.

What libraries read while they are imported cannot change any more: a launch that wants another environment than the
server's gets fresh interpreters. So do launches on a machine with accelerators, and without fork.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from grpo_ext.tools.check.runs import OUTPUT, WORKER, Process, launched, ranked

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
SERVED = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
# read when a run begins and not before (compilers, wandb), the server's own, or about accelerators: there is none
LATER = (
    *ranked({}, 2)[0],
    *("PYTEST_CURRENT_TEST", "ACCELERATE_USE_CPU", "PYTHONPATH", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    *("CC", "CXX", "WANDB_SERVICE", "DS_ACCELERATOR", "CUBLAS_WORKSPACE_CONFIG"),
)
PATIENCE_S = 30.0  # from the end of the first process to that of the others, as torchrun has it


@functools.cache
def server() -> tuple[Any, dict[str, str]]:
    """The context of the fork server, and the environment that it was started with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    with mock.patch.dict(os.environ, {**SERVED, "PYTHONPATH": PATH}):
        multiprocessing.forkserver.ensure_running()
        return context, dict(os.environ)


def serves(environment: dict[str, str]) -> bool:
    """Whether a process with this environment can be forked; the tests say so where it cannot."""
    import torch

    if not hasattr(os, "fork") or sys.platform != "linux" or torch.accelerator.is_available():
        return False
    _, here = server()
    other = {name for name in here.keys() | environment.keys() if here.get(name) != environment.get(name)} - {*LATER}
    if other:
        warnings.warn(f"fresh interpreters for a launch: {sorted(other)} differ from those of the server", stacklevel=3)
    return not other


class Forked:
    """Processes that the server forks.

    Args:
        command: a script or module (`-m name`) with its arguments.
        environments: of each process.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[dict[str, str]], cwd: Path = ROOT) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        self._deadline: float | None = None  # from the first failure to the end of the others
        self._processes: list[Any] = []
        for output in self._outputs:
            output.touch()
        for environment in environments:
            rank = environment.get("RANK", "0")
            work = (list(command), environment, str(cwd), *map(str, self._outputs))
            self._processes.append(server()[0].Process(target=be, args=work, name=rank))
            self._processes[-1].start()

    def status(self) -> int | None:
        """As the launcher: the first failure ends the others, and is 1 where there are several."""
        codes = [process.exitcode for process in self._processes]
        failed = [(process.name, code) for process, code in zip(self._processes, codes) if code]
        if failed and self._deadline is None:
            self._deadline = time.monotonic() + PATIENCE_S
            if len(codes) > 1:
                with self._outputs[1].open("a") as errors:
                    errors.write("\nprocess {} ended with status {}".format(*failed[0]))
            self._end(signal.SIGTERM)
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._end(signal.SIGKILL)
        if None in codes:
            return None
        return 1 if failed and len(codes) > 1 else next((code for _, code in failed), 0)

    def output(self) -> str:
        """What all processes have printed, errors last."""
        return "".join(self.texts())

    def texts(self) -> list[str]:
        """Output and errors apart."""
        return [output.read_text(errors="replace") for output in self._outputs]

    def kill(self) -> None:
        """Leave no process."""
        self._end(signal.SIGKILL)
        for process in self._processes:
            process.join()

    def wait(self, timeout_s: float) -> tuple[int | None, str]:
        """Status and output; the status is None where they took longer."""
        end = time.monotonic() + timeout_s
        try:
            while (status := self.status()) is None and time.monotonic() < end:
                running = [process.sentinel for process in self._processes if process.exitcode is None]
                multiprocessing.connection.wait(running, timeout=0.1)
        finally:
            self.kill()
        return status, self.output()

    def _end(self, number: int) -> None:
        for process in self._processes:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    try:
                        os.killpg(process.pid, number)
                    except ProcessLookupError:  # it has no group of its own yet
                        os.kill(process.pid, number)


def forked(folder: Path, environment: dict[str, str], pipe: Connection) -> Process:
    """A `Starter` (grpo_ext.tools.check.runs): from the server where it can, otherwise as a user's launch."""
    if not serves(environment):
        return launched(folder, environment, pipe)
    output = folder / OUTPUT
    output.touch()
    work = (["-m", WORKER, str(folder)], environment, str(ROOT), str(output), str(output), pipe)
    process = server()[0].Process(target=be, args=work)
    process.start()
    return SimpleNamespace(kill=process.kill, wait=lambda: process.join() or process.exitcode)


def run_forked(
    command: Sequence[str], processes: int, environment: dict[str, str], timeout_s: float
) -> tuple[int | None, str]:
    """Status and output of a script or module (`-m name`) with its arguments on forked processes."""
    return Forked(command, ranked(environment, processes)).wait(timeout_s)


TELL = """
import json, os, sys
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""


def run_forked_by(
    launcher: Sequence[str], command: Sequence[str], environment: dict[str, str], timeout_s: float
) -> tuple[int | None, str]:
    """As `launcher command`, on forked processes: the launcher starts a script that tells what it was given."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "tell.py"
        script.write_text(TELL)
        subprocess.run([*launcher, str(script), folder], cwd=ROOT, env=environment, check=True, capture_output=True)
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    # the launcher is gone, and with it the store of its own
    addresses = ranked({}, len(told))
    told = [{k: v for k, v in one.items() if not k.startswith("TORCHELASTIC")} | a for one, a in zip(told, addresses)]
    return Forked(command, told).wait(timeout_s)


def python(
    *command: object, cwd: Path = ROOT, timeout_s: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python command` with its output and errors apart, forked where it can be.

    Args:
        environment: what the command finds beside the environment of the tests; only what nothing reads at its import.
    """
    parts, here = [str(part) for part in command], {**os.environ, **SERVED}
    if not serves(here):
        return subprocess.run(
            [sys.executable, *parts],
            cwd=cwd,
            env={**here, "PYTHONPATH": PATH, **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    process = Forked(parts, [{**here, **environment}], cwd)
    status, _ = process.wait(timeout_s)
    if status is None:
        raise subprocess.TimeoutExpired(parts, timeout_s, *process.texts())
    return subprocess.CompletedProcess(parts, status, *process.texts())


def be(
    command: list[str], environment: dict[str, str], cwd: str, output: str, errors: str, pipe: Connection | None = None
) -> None:
    """The life of a forked process; it never returns. The last argument of a command is its end of a pipe."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for path, descriptor in ((output, 1), (errors, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        command = [*command, *([] if pipe is None else [str(pipe.fileno())])]
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        code = ended.code
        status = code if isinstance(code, int) else int(code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
