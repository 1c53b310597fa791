"""A server that has imported everything and forks the processes of a launch: they start at once.

Importing torch, transformers, TRL and DeepSpeed takes a process ten seconds and more, training a tiny model one or two.
The server imports them once and computes nothing, so what it forks is as a fresh interpreter after its imports: no
state of Accelerate, no thread of torch, no random number drawn. A process gets the environment, the arguments and the
`__main__` that Accelerate's launcher would have given it (torchrun's, under it), and a launch ends as there: where one
process fails, the others are told to end, and what they wrote lies in the folder of the launch.

What libraries read while they are imported cannot change any more: a launch that wants another environment than the
server's gets fresh interpreters. So do launches on a machine with accelerators, and without fork.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from grpo_ext.tools.check.runs import Processes, free_port, launched

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
SERVED = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
# read when a run begins and not before (compilers, wandb), the server's own, or about accelerators: there is none
LATER = (
    *("PYTEST_CURRENT_TEST", "ACCELERATE_USE_CPU", "PYTHONPATH", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    *("CC", "CXX", "WANDB_SERVICE", "DS_ACCELERATOR", "CUBLAS_WORKSPACE_CONFIG"),
)
PATIENCE_S = 30.0  # from the end of the first process to that of the others, as torchrun has it


class Server:
    """The side of the tests: starts the server and asks it for launches, one at a time."""

    def __init__(self) -> None:
        self.environment = {**os.environ, **SERVED}
        self.remarks = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forks"],
            cwd=ROOT,
            env={**self.environment, "PYTHONPATH": PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.remarks,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which then end the server
        )
        self._asking = ThreadPoolExecutor(1)
        self._answer: Future[list[Any]] | None = None
        atexit.register(self.close)

    def ask(self, **launch: Any) -> list[Any]:
        """Status and output of a launch, as a `Starter` has them; outputs and errors of a single process apart."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(launch), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BaseException:
            self.close()
            raise
        if not answer:
            self.close()
            self.remarks.seek(0)
            raise RuntimeError(f"the server of forks is gone: {self.remarks.read()[-3000:]}")
        return json.loads(answer)

    def submit(self, **launch: Any) -> Future[list[Any]]:
        """`ask`, without waiting for the answer."""
        self._answer = self._asking.submit(self.ask, **launch)
        return self._answer

    def end_launch(self) -> None:
        """End what was submitted: a line that comes during a launch does."""
        print("null", file=self.process.stdin, flush=True)

    def close(self) -> None:
        """End the server, and with it every process of a launch."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    @property
    def idle(self) -> bool:
        return self._answer is None or self._answer.done()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None and not self.process.stdin.closed  # type: ignore[union-attr]


_servers: list[Server] = []


def server() -> Server:
    """A server of this process of the tests without a launch."""
    if not (free := [one for one in _servers if one.alive and one.idle]):
        _servers.append(Server())
        return _servers[-1]
    return free[0]


def serves(environment: dict[str, str]) -> bool:
    """Whether a process with this environment can be forked; the tests say so where it cannot."""
    import torch

    if not hasattr(os, "fork") or sys.platform != "linux" or torch.accelerator.is_available():
        return False
    here = server().environment
    other = {name for name in here.keys() | environment.keys() if here.get(name) != environment.get(name)} - {*LATER}
    if other:
        warnings.warn(f"fresh interpreters for a launch: {sorted(other)} differ from those of the server", stacklevel=3)
    return not other


class Forked(Processes):
    """The processes of a launch (grpo_ext.tools.check.runs) that a server forks; it has no other launch meanwhile."""

    def __init__(self, command: Sequence[str], processes: int, environment: dict[str, str]) -> None:
        self._server = server()
        port = free_port() if processes > 1 else 0
        launch = {"command": list(command), "environments": environments(environment, processes, port)}
        self._answer = self._server.submit(**launch, timeout_s=3600)

    def status(self) -> int | None:
        return self._answer.result()[0] if self._answer.done() else None

    def output(self) -> str:
        return "".join(self._answer.result()[1:]) if self._answer.done() else ""

    def kill(self) -> None:
        if not self._answer.done():
            self._server.end_launch()
            self._answer.result()


def forked(folder: Path, processes: int, environment: dict[str, str]) -> Processes:
    """A `Starter` (grpo_ext.tools.check.runs): from a server where it can, otherwise as a user's launch."""
    if not serves(environment):
        return launched(folder, processes, environment)
    return Forked(["-m", "grpo_ext.tools.check.worker", str(folder), str(os.getpid())], processes, environment)


def run_forked(
    command: Sequence[str], processes: int, environment: dict[str, str], timeout_s: float
) -> tuple[int | None, str]:
    """Status and output of a script or module (`-m name`) with its arguments on forked processes."""
    port = free_port() if processes > 1 else 0
    status, output, errors = server().ask(
        command=list(command), environments=environments(environment, processes, port), timeout_s=timeout_s
    )
    return status, output + errors


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
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    told = [{k: v for k, v in one.items() if not k.startswith("TORCHELASTIC")} | given for one in told]
    status, output, errors = server().ask(command=list(command), environments=told, timeout_s=timeout_s)
    return status, output + errors


def python(
    *command: object, cwd: Path = ROOT, timeout_s: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python command` with its output and errors apart, forked where it can be.

    Args:
        environment: what the command finds beside the environment of the tests; only what nothing reads at its import.
    """
    parts = [str(part) for part in command]
    here = {**os.environ, **SERVED}
    if not serves(here):
        return subprocess.run(
            [sys.executable, *parts],
            cwd=cwd,
            env={**here, "PYTHONPATH": PATH, **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    found = server().ask(
        command=parts, environments=[{**here, **environment}], timeout_s=timeout_s, apart=True, cwd=str(cwd)
    )
    if found[0] is None:
        raise subprocess.TimeoutExpired(parts, timeout_s, *found[1:])
    return subprocess.CompletedProcess(parts, *found)


def environments(environment: dict[str, str], processes: int, port: int) -> list[dict[str, str]]:
    """The environment of each process, as torch's launcher sets it; a single process has no launcher."""
    if processes == 1:
        return [environment]
    common = {
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": str(processes),
        "WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(processes),
    }
    return [{**common, "RANK": str(r), "LOCAL_RANK": str(r), "ROLE_RANK": str(r)} for r in range(processes)]


# ---- the side of the server ----


def main() -> None:
    """Import, then fork what is asked for until the tests close the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print while they are imported
    preload()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 2:  # pyarrow's allocator has one, and knows of forks
        names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
        print(f"the imports have started threads: {names}", file=sys.stderr, flush=True)
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)  # as in tests/conftest.py
    gc.collect()
    gc.freeze()  # also, pages that are shared stay shared
    for line in iter(sys.stdin.buffer.raw.readline, b""):  # not more than a line: `watch` looks for the next one
        if line == b"null\n":  # for a launch that ended in the meantime
            continue
        print(json.dumps(launch(**json.loads(line))), file=answers, flush=True)


def preload() -> None:
    """What a run imports, now or in its course."""
    import grpo_ext
    import grpo_ext.run.fingerprint
    import grpo_ext.tools.check.worker
    import tests.support.cases
    import tests.support.kills  # noqa: F401

    assert grpo_ext.GRPOConfig
    assert grpo_ext.GRPOTrainer
    if importlib.util.find_spec("deepspeed") is not None:
        import deepspeed  # noqa: F401  Accelerate looks into it as soon as it is installed


def launch(
    command: list[str], environments: list[dict[str, str]], timeout_s: float, apart: bool = False, cwd: str = str(ROOT)
) -> tuple[int | None, str, str]:
    """Fork one process for each environment and wait for them: (status, output, errors), status None after `timeout_s`.

    Errors are among the output unless they are wanted `apart`.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        pids = {}
        for environment in environments:
            pid = os.fork()
            if pid == 0:
                os.chdir(cwd)
                be(command, environment, output.fileno(), (errors if apart else output).fileno())
            pids[pid] = environment.get("RANK", "0")
        status, said = watch(pids, time.monotonic() + timeout_s)
        if len(environments) > 1 and status:
            status = 1  # as the launcher
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return status, texts[0], texts[1] + ("" if apart else said)


def watch(pids: dict[int, str], deadline: float) -> tuple[int | None, str]:
    """Wait for the processes (with their ranks); none is left afterwards."""
    running, failed, said, timed_out = dict(pids), 0, "", False
    while running:
        for pid in list(running):
            found, code = os.waitpid(pid, os.WNOHANG)
            if found == 0:
                continue
            rank, status = running.pop(pid), os.waitstatus_to_exitcode(code)
            if status != 0 and not failed and not timed_out:
                failed, said = status, f"\nprocess {rank} ended with status {status}"
                deadline = time.monotonic() + PATIENCE_S
                end(running, signal.SIGTERM)
        if running and time.monotonic() > deadline:
            timed_out = not failed
            end(running, signal.SIGKILL)
        # readable before the launch is over: the tests end it, or are gone
        if running and select.select([sys.stdin], [], [], 0.01)[0]:
            end(running, signal.SIGKILL)
    return (None if timed_out else failed), said


def end(pids: dict[int, str], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def be(command: list[str], environment: dict[str, str], output: int, errors: int) -> None:
    """The life of a forked process; it never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.environ.clear()
        os.environ.update(environment)
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


if __name__ == "__main__":
    main()
