"""Starts a script on real CPU processes through Accelerate's launcher, as a user does."""

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

from grpo_ext.tools.check.runs import ranked
from tests.support import forks
from tests.support.forks import ROOT


def environment(**more: str) -> dict[str, str]:
    """The environment of a launch: that of the tests, which says nothing about processes, and `more`."""
    about_processes = ("ACCELERATE_USE_CPU", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    return {k: v for k, v in os.environ.items() if k not in about_processes} | forks.SERVED | more


def launcher(processes: int = 2) -> list[str]:
    """`accelerate launch --config_file cpu_2.yaml`."""
    config = ROOT / "recipes" / "accelerate" / "cpu_2.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*command, "--num_processes", str(processes), "--main_process_port", "0"]


def accelerate_launch(script: Path, *args: str, processes: int = 2, timeout: float = 300):
    """Run a script by `launcher`; the environment says nothing about processes."""
    command, env = [*launcher(processes), str(script), *args], environment(PYTHONPATH=str(ROOT))
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def on_processes(processes: int, script: Path, *args: str, timeout: float = 300) -> tuple[int | None, str]:
    """Status and output of a script on processes as by `accelerate_launch`, forked where they can be."""
    env = environment()
    if forks.serves(env):
        status, *texts = forks.run([str(script), *args], ranked(env, processes), timeout)
        return status, "".join(texts)
    done = accelerate_launch(script, *args, processes=processes, timeout=timeout)
    return done.returncode, done.stdout + done.stderr


two_processes = functools.partial(on_processes, 2)


def leave(folder: Path, patience_s: float = 60.0) -> None:
    """End this process once every process of the launch is done, without destroying torch's process group.

    With several DDP models the order of destruction is undefined, and gloo's destructor can wait for a thread that
    waits for the interpreter lock: a deadlock at exit, now and then.
    """
    (folder / f"done_{os.environ.get('RANK', '0')}").touch()
    processes, start = int(os.environ.get("WORLD_SIZE", "1")), time.perf_counter()
    while len(list(folder.glob("done_*"))) < processes and time.perf_counter() - start < patience_s:
        time.sleep(0.05)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
