"""Reward functions that fail, hang or die in a process of their own: nothing of them stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import psutil
import pytest

from grpo_ext.errors import RewardError
from grpo_ext.rewards.guard import Faults
from tests.support.rewards import PATIENCE_S, process_id, score, working

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def state():
    accelerate.PartialState()  # the logger asks it which process this is


def gone(pid: int) -> bool:
    """Whether a process ends."""
    until = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


# ---- What fails there -----------------------------------------------------------------------------------------------


def unscorable() -> type[Exception]:
    class Unscorable(ValueError):
        def __init__(self, first: int, second: int) -> None:  # so that pickle cannot make it again
            super().__init__(f"{first} and {second}")

    return Unscorable


@pytest.mark.parametrize("raises", [lambda completions, **kwargs: {}["answer"], lambda completions: [0.0]])
def test_an_error_reads_as_in_the_training_process(raises):
    with pytest.raises(RewardError) as here:
        score([raises])
    with working() as workers, pytest.raises(RewardError) as there:
        score([raises], workers)
    assert str(there.value) == str(here.value)


def test_an_error_of_a_class_that_cannot_be_pickled_is_named_and_shows_where_it_was_raised():
    kind = unscorable()

    def graded(completions, **kwargs):
        raise kind(1, 2)

    with working() as workers, pytest.raises(RewardError, match="raised Unscorable: 1 and 2;") as caught:
        score([graded], workers)
    assert "in graded" in str(caught.value.__cause__.__cause__)


def hanging(folder: Path) -> Callable[..., Any]:
    """A function that hangs on the completion "ccc", with the interpreter's lock and a process that it has started."""

    def graded(completions, **kwargs):
        if "ccc" in completions:
            other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            (folder / "pids").write_text(f"{os.getpid()} {other.pid}")
            re.match(r"(a+)+$", "a" * 60 + "b")
        return [1.0] * len(completions)

    return graded


def test_a_call_that_hangs_is_killed_with_what_it_started_and_the_others_go_on(tmp_path, caplog):
    faults = Faults(timeout=2.0, on_failure="none")
    with working(2) as workers:
        rewards, _ = score([hanging(tmp_path), process_id], workers, faults)
        assert rewards[0] == [1.0, 1.0, None, None, 1.0]
        assert None not in rewards[1]
        assert "no answer within reward_timeout=2.0 seconds" in caplog.text
        assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
        assert None not in score([process_id], workers, faults)[0][0]


ENDINGS = {
    "os._exit(7)": "its process has ended: EXIT(7)",
    "os.kill(os.getpid(), signal.SIGKILL)": "its process has ended: SIGKILL(-9)",
    "sys.exit(3)": "SystemExit: 3",
}


@pytest.mark.parametrize("code", ENDINGS)
def test_a_worker_that_ends_is_a_call_that_failed(code, tmp_path, caplog):
    def graded(completions, **kwargs):
        if "ccc" in completions and len(list(tmp_path.iterdir())) < 2:
            (tmp_path / f"{time.monotonic_ns()}").touch()
            exec(code, {"os": os, "signal": signal, "sys": sys})
        return [1.0] * len(completions)

    with working() as workers:
        with pytest.raises(RewardError, match=re.escape(ENDINGS[code])):
            score([graded], workers)
        assert score([graded], workers, Faults(retries=1))[0] == [[1.0] * 5]
        assert "try 2 of 2 follows" in caplog.text


# ---- The end --------------------------------------------------------------------------------------------------------


def test_a_kill_is_final_for_the_calls_of_that_time(tmp_path, caplog):
    def slow(completions, **kwargs):
        with (tmp_path / "starts").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(60)

    def bad(completions, **kwargs):
        while not (tmp_path / "starts").exists():
            time.sleep(0.01)
        raise ValueError("scored")

    with working(2) as workers:
        with pytest.raises(RewardError, match="'function_0' raised ValueError: scored;"):
            score([bad, slow], workers, Faults(retries=1), chunk=None)
        assert score([process_id], workers)[0] != [[]]  # goes on afterwards
    (pid,) = (tmp_path / "starts").read_text().split()
    assert gone(int(pid))
    assert "'function_1' failed" not in caplog.text


def test_a_worker_keeps_what_its_function_loads_at_its_first_call():
    loaded: list[bytes] = []

    def loads(completions, log_extra, **kwargs):
        if not loaded:
            loaded.append(b"1" * 400_000_000)
            time.sleep(1.2)  # loky looks at the memory of a process once a second
        return [float(os.getpid()) for _ in completions]

    with working() as workers:
        rewards, _ = score([loads], workers, chunk=1, recorders={"log_extra": lambda *_: None})
    assert len(set(rewards[0])) == 1


SCRIPT = """
    import os, re, signal, sys, threading, time
    import accelerate
    from grpo_ext.rewards.workers import RewardWorkers
    from tests.support.rewards import score

    print("imported", flush=True)
    accelerate.PartialState()
    LENGTHS = {"a": 1.5}
    pids = sys.argv[1]

    def graded(completions, **kwargs):
        return [LENGTHS[c] for c in completions]

    def hangs(completions, **kwargs):
        open(pids, "w").write(f"{os.getpid()} ")
        re.match(r"(a+)+$", "a" * 60 + "b")

    workers = RewardWorkers(1, 0)
    print(score([graded], workers, completions=["a"] * 5)[0], flush=True)
    threading.Thread(target=score, args=([hangs], workers), daemon=True).start()
    while not os.path.exists(pids) or " " not in open(pids).read():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_functions_of_a_script_without_a_guard_run_and_no_worker_outlives_it(tmp_path):
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, pids], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines() == ["imported", "[[1.5, 1.5, 1.5, 1.5, 1.5]]"], done.stderr  # it was run once
    assert done.returncode == -signal.SIGKILL
    assert all(gone(int(pid)) for pid in pids.read_text().split())
