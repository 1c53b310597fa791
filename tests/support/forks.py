"""Launches whose processes are forked from a server that has imported everything: they start at once.

Importing torch, transformers, TRL and DeepSpeed takes a process ten seconds and more, training a tiny model one or two.
The fork server of `multiprocessing` imports them once (tests.support.preload) and computes nothing, so what it forks is
as a fresh interpreter after its imports: no state of Accelerate, no thread of torch, no random number drawn. pytest has
imported nearly all of that when it has collected the tests, and has computed nothing: the server is a fork of it. A
process gets the environment, the arguments and the `__main__` that Accelerate's launcher would have given it
(torchrun's, under it), and a launch ends as there: where one process fails, the others are told to end.

What libraries read while they are imported cannot change any more: a launch that wants another environment than the
server's gets fresh interpreters. So do launches on a machine with accelerators, and without fork.
"""

import contextlib
import faulthandler
import functools
import json
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from grpo_ext.tools.check.runs import OUTPUT, launched, ranked
from tests.support import spared
from tests.support.selection import FULL

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
SUPPORT = "tests.support"
WORKER = f"{SUPPORT}.worker"
SERVED = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
AT_IMPORT = {name: value for name, value in SERVED.items() if name != "PYTHONWARNINGS"}
# read when a run begins and not before (compilers, wandb), the server's own, or about accelerators: there is none
LATER = (
    *ranked({}, 2)[0],
    *("PYTEST_CURRENT_TEST", "ACCELERATE_USE_CPU", "PYTHONPATH", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    *(FULL, "CC", "CXX", "WANDB_SERVICE", "DS_ACCELERATOR", "CUBLAS_WORKSPACE_CONFIG"),
)
PATIENCE_S = 30.0  # from the end of the first process to that of the others, as torchrun has it


@functools.cache
def served() -> dict[str, str]:
    """The environment of the fork server."""
    return {**os.environ, **SERVED, "PYTHONPATH": PATH}


def server() -> Any:
    """The context of the fork server, which runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    with mock.patch.dict(os.environ, served(), clear=True):
        multiprocessing.forkserver.ensure_running()
    return context


def fork_server() -> None:
    """Fork the server from this process, which has computed nothing yet; not if it began with another environment."""
    if serves(served()) and all(os.environ.get(name) == value for name, value in AT_IMPORT.items()):
        multiprocessing.resource_tracker.ensure_running()  # not a fork
        with mock.patch.object(multiprocessing.util, "spawnv_passfds", fork_instead):
            server()


def fork_instead(path: str, args: Sequence[str], descriptors: Sequence[int]) -> int:
    """Fork a process that runs the code of `python -c code`, instead of starting one; returns its number.

    Nothing of pytest's stays in it: streams, hooks, handlers, open files.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if number := os.fork():
        return number
    try:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
        threading.excepthook = threading.__excepthook__
        logging.root.handlers.clear()
        for name in [name for name in sys.modules if name.startswith("tests.") and not name.startswith(SUPPORT)]:
            del sys.modules[name]  # a module of tests may have read the environment of pytest
        sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
        warnings.simplefilter("ignore")
        faulthandler.disable()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
            if descriptor > 2 and descriptor not in descriptors:
                os.dup2(nothing, descriptor)  # not closed: its owner would close another of this number
        multiprocessing.forkserver._forkserver.__init__()  # its lock is held: it starts the server
        exec(args[-1])
    finally:
        os._exit(1)


def serves(environment: dict[str, str]) -> bool:
    """Whether a process with this environment can be forked; the tests say so where it cannot."""
    import torch

    if not hasattr(os, "fork") or sys.platform != "linux" or torch.accelerator.is_available():
        return False
    here = served()
    other = {name for name in here.keys() | environment.keys() if here.get(name) != environment.get(name)} - {*LATER}
    if other:
        warnings.warn(f"fresh interpreters for a launch: {sorted(other)} differ from those of the server", stacklevel=3)
    return not other


def start(command: Sequence[str], environment: dict[str, str], cwd: Path, *files: Any) -> Any:
    """A process that the server forks, with a script or module (`-m name`) and its arguments."""
    for file in files[:2]:
        file.touch()
    process = server().Process(target=be, args=(list(command), environment, str(cwd), *files))
    process.start()
    return process


def run(
    command: Sequence[str], environments: Sequence[dict[str, str]], timeout_s: float, cwd: Path = ROOT
) -> tuple[int | None, str, str]:
    """Status, output and errors of forked processes; the status is None where they took longer.

    Those that took longer say where they are, in the errors. As in torch's launcher the first failure ends the others,
    and the status is 1 where there are several.
    """
    failed: Any = None
    end = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        processes = [start(command, environment, cwd, *files) for environment in environments]
        try:
            while time.monotonic() < end and (running := [p for p in processes if p.exitcode is None]):
                multiprocessing.connection.wait([process.sentinel for process in running], timeout=0.1)
                if failed is None and (failed := next((p for p in processes if p.exitcode), None)) is not None:
                    end = min(end, time.monotonic() + PATIENCE_S)
                    signal_to(processes, signal.SIGTERM)
            if late := failed is None and any(process.exitcode is None for process in processes):
                signal_to(processes, signal.SIGUSR1)  # they write where they are
                time.sleep(1.0)
        finally:
            signal_to(processes, signal.SIGKILL)
            for process in processes:
                process.join()
        output, errors = (file.read_text(errors="replace") for file in files)
    if failed is None or len(processes) == 1:
        return None if late else processes[0].exitcode, output, errors
    rank = processes.index(failed)
    return 1, output, f"{errors}\nprocess {rank} ended with status {failed.exitcode}"


def signal_to(processes: Sequence[Any], number: int) -> None:
    """Signal the processes that still run, and what they have started."""
    for process in processes:
        if process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # it has no group of its own yet
                    os.kill(process.pid, number)


def fresh(folder: Path, environment: dict[str, str], pipe: Connection) -> Any:
    """A `Starter` (grpo_ext.tools.check.runs): a user's launch, with the worker of the tests."""
    return launched(folder, {**environment, "PYTHONPATH": PATH}, pipe, WORKER)


def forked(folder: Path, environment: dict[str, str], pipe: Connection) -> Any:
    """A `Starter`: from the server where it can, otherwise as a user's launch."""
    if not serves(environment):
        return fresh(folder, environment, pipe)
    output = folder / OUTPUT
    process = start(["-m", WORKER, str(folder)], environment, ROOT, output, output, pipe)
    return SimpleNamespace(kill=process.kill, wait=lambda: process.join() or process.exitcode)


TELL = """
import json, os, sys
with open(f"{sys.argv[1]}/{os.environ.get('RANK', '0')}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""


def run_forked_by(
    launcher: Sequence[str],
    command: Sequence[str],
    environment: dict[str, str],
    timeout_s: float,
    cwd: Path = ROOT,
) -> tuple[int | None, str, str]:
    """As `launcher command`, on forked processes: the launcher starts a script that tells what it was given.

    Returns the status, the output and the errors, each with the launcher's own at its beginning.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "tell.py"
        script.write_text(TELL)
        status, *texts = run([*launcher[1:], str(script), folder], [environment], timeout_s, cwd)
        assert status == 0, texts
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    # the launcher is gone, and with it the store of its own
    addresses = ranked({}, len(told))
    told = [{k: v for k, v in one.items() if not k.startswith("TORCHELASTIC")} | a for one, a in zip(told, addresses)]
    status, output, errors = run(command, told, timeout_s, cwd)
    return status, texts[0] + output, texts[1] + errors


def python(
    *command: object, cwd: Path = ROOT, timeout_s: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python command`, forked where it can be; `environment` has only what nothing reads at its import."""
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
    status, *texts = run(parts, [{**here, **environment}], timeout_s, cwd)
    if status is None:
        raise subprocess.TimeoutExpired(parts, timeout_s, *texts)
    return subprocess.CompletedProcess(parts, status, *texts)


def be(
    command: list[str],
    environment: dict[str, str],
    cwd: str,
    output: Path,
    errors: Path,
    pipe: Connection | None = None,
) -> None:
    """The life of a forked process; it never returns. The last argument of a command is its end of a pipe."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for path, descriptor in ((output, 1), (errors, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
        faulthandler.register(signal.SIGUSR1, file=2)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        spared.remember_comparisons()
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
