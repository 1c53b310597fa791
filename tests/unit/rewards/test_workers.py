"""Reward functions in processes of their own: the same rewards and records, and nothing that hangs or dies stays."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import TrainerState

from grpo_ext.errors import ConfigError, RewardError
from grpo_ext.rewards.guard import Faults
from grpo_ext.rewards.registry import resolve_rewards
from tests.support.rewards import PATIENCE_S, process_id, score, working

ROOT = Path(__file__).parents[3]


def gone(pid: int) -> bool:
    """Whether a process ends."""
    until = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


# every process of a worker imports torch
@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.full) for number in (1, 3))])
def test_functions_of_every_kind_give_the_same_for_every_number_of_workers(number):
    factor = 3

    def length(completions, answer, log_metric, log_extra, **kwargs):
        log_metric("mean", np.mean([len(c) for c in completions]))
        log_extra("length", [len(c) for c in completions])
        return [factor * len(c) for c in completions]

    def yielding(completions, trainer_state, **kwargs):
        yield from (None if len(c) == 3 else trainer_state.global_step + trainer_state.epoch for c in completions)

    class Scaled:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, completions, **kwargs):
            return torch.tensor([self.by * len(c) for c in completions], dtype=torch.bfloat16)

    functions = [length, yielding, Scaled(0.5), functools.partial(length, extra=1)]
    functions += resolve_rewards(["length_penalty", f"{ROOT}/recipes/rewards/example.py:share_in_place"], 10)
    state = TrainerState(epoch=0.5, global_step=7)
    here = score(functions, state=state)
    assert [len(rewards) for rewards in here[0]] == [5] * 6
    assert here[1][0].metrics == [("mean", 1.5)]
    assert here[1][0].columns == {"length": [1, 2]}
    with working(number) as workers:
        assert score(functions, workers, state=state) == here


def test_a_worker_is_a_fresh_single_threaded_interpreter_outside_the_launch(monkeypatch):
    def looks(completions, trainer_state, log_extra, **kwargs):
        names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "ACCELERATE_USE_CPU", "OTHER")
        modules = [name in sys.modules for name in ("torch", "transformers", __name__)]
        log_extra("process", [[os.environ.get(name) for name in names], modules, sys.stdin.read(), trainer_state])
        return [0.0] * len(completions)

    for name in ("OMP_NUM_THREADS", "WORLD_SIZE", "ACCELERATE_USE_CPU", "OTHER"):
        monkeypatch.setenv(name, "4")
    logged: list[Any] = []
    with working() as workers:
        log_extra = functools.partial(lambda _, values: logged.append(values))  # the user's: called in this process
        _, calls = score([looks], workers, chunk=None, state=TrainerState(), log_extra=log_extra)
    assert calls[0].columns == {}
    variables, modules, stdin, state = logged[0]
    assert variables == ["1", "", None, None, "4"]
    assert modules == [False, False, False]
    assert stdin == ""
    assert vars(state) == vars(TrainerState())


def test_a_function_that_cannot_be_loaded_ends_the_run_at_once(monkeypatch, caplog):
    module = types.ModuleType("made_up_here")
    exec("def graded(completions, **kwargs): return []", vars(module))
    monkeypatch.setitem(sys.modules, "made_up_here", module)
    says = r"'function_0' cannot be loaded .*No module named 'made_up_here'\); define it in the script or in a module"
    with working() as workers, pytest.raises(ConfigError, match=says):
        score([module.graded], workers, Faults(retries=2, on_failure="none"))
    assert "follows" not in caplog.text


def test_an_error_reads_as_in_the_training_process_and_shows_where_it_was_raised():
    def raises(completions, **kwargs):
        return {}["answer"]

    with pytest.raises(RewardError) as here:
        score([raises])
    with working() as workers, pytest.raises(RewardError) as there:
        score([raises], workers)
    assert str(there.value) == str(here.value)
    assert 'worker.py", line' in str(there.value.__cause__.__cause__)


def test_a_hanging_call_is_killed_with_its_child_processes(tmp_path, caplog):
    def hangs(completions, **kwargs):  # with the interpreter's lock, and a process that it has started
        if "ccc" in completions:
            other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            (tmp_path / "pids").write_text(f"{os.getpid()} {other.pid}")
            re.match(r"(a+)+$", "a" * 60 + "b")
        return [1.0] * len(completions)

    faults = Faults(timeout=2.0, on_failure="none")
    with working(2) as workers:
        rewards, _ = score([hangs, process_id], workers, faults)
        assert rewards[0] == [1.0, 1.0, None, None, 1.0]
        assert None not in rewards[1]
        assert "no answer within reward_timeout=2.0 seconds" in caplog.text
        assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
        assert None not in score([process_id], workers, faults)[0][0]


def ending(code: str, times: int, folder: Path) -> Callable[..., Any]:
    """A function that runs a line of code the first times that it scores the completion "ccc"."""

    def graded(completions, **kwargs):
        if "ccc" in completions and len(list(folder.iterdir())) < times:
            (folder / f"{time.monotonic_ns()}").touch()
            exec(code, {"os": os, "signal": signal, "sys": sys})
        return [1.0] * len(completions)

    return graded


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("os._exit(7)", r"its process has ended: EXIT\(7\)"),
        pytest.param(  # by a signal it ends below
            "os.kill(os.getpid(), signal.SIGKILL)",
            r"its process has ended: SIGKILL\(-9\)",
            marks=pytest.mark.full,
        ),
        ("sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_worker_that_ends_is_a_call_that_failed(code, says, tmp_path, caplog):
    with working() as workers:
        graded = ending(code, 2, tmp_path)
        with pytest.raises(RewardError, match=says):
            score([graded], workers)
        assert score([graded], workers, Faults(retries=1))[0] == [[1.0] * 5]
        assert "try 2 of 2 follows" in caplog.text


def test_a_worker_that_a_cluster_terminates_is_replaced_and_its_call_made_again_once(tmp_path):
    graded = ending("os.kill(os.getpid(), signal.SIGTERM)", 3, tmp_path)
    with working() as workers:
        with pytest.raises(RewardError, match=r"SIGTERM\(-15\); .*reward_on_failure='none' continues without"):
            score([graded], workers)
        assert score([graded], workers)[0] == [[1.0] * 5]
