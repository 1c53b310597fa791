"""Reward functions in processes of their own: the same rewards and records, and nothing that hangs or dies stays."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import random
import signal
import sys
import textwrap
import time
import types
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from transformers import TrainerState

from grpo_ext.errors import ConfigError, RewardError
from grpo_ext.rewards.guard import Faults
from grpo_ext.rewards.registry import resolve_rewards
from tests.support.rewards import PATIENCE_S, process_id, score, working

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def state():
    accelerate.PartialState()  # the logger asks it which process this is


# ---- The same as in the training process ----------------------------------------------------------------------------


def kinds_of_functions() -> list[Callable[..., Any]]:
    factor, exact = 3, [Decimal("0.5"), np.float32(2.5)]

    def length(completions, answer, log_metric, log_extra, **kwargs):
        log_metric("mean", np.mean([len(c) for c in completions]))
        log_extra("length", [len(c) for c in completions])
        log_metric(name="answers", value=len(answer))
        log_extra(column="length", values=[])
        return [factor * len(c) for c in completions]

    def yielding(completions, trainer_state, **kwargs):
        yield from (None if len(c) == 3 else trainer_state.global_step + trainer_state.epoch for c in completions)

    class Scaled:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, completions, **kwargs):
            return torch.tensor([self.by * len(c) for c in completions], dtype=torch.bfloat16)

    return [
        length,
        yielding,
        Scaled(0.5),
        Scaled(0.25).__call__,
        functools.partial(length, extra=1),
        lambda completions, **kwargs: exact[: len(completions)],
        *resolve_rewards(["length_penalty", f"{ROOT}/recipes/rewards/example.py:share_in_place"], 10),
    ]


def test_functions_of_every_kind_give_the_same_for_every_number_of_workers():
    state = TrainerState(epoch=0.5, global_step=7)
    here = score(kinds_of_functions(), state=state)
    assert [len(rewards) for rewards in here[0]] == [5] * 8
    assert here[1][0].metrics == [("mean", 1.5), ("answers", 2.0)]
    assert here[1][0].columns == {"length": [1, 2]}
    for number in (1, 3):
        with working(number) as workers:
            assert score(kinds_of_functions(), workers, state=state) == here


def test_chunks_of_all_functions_run_concurrently(tmp_path):
    def meets(mine: str, other: str) -> Callable[..., Any]:
        def graded(completions, **kwargs):
            (tmp_path / mine).touch()
            while not (tmp_path / other).exists():
                time.sleep(0.01)
            return [1.0] * len(completions)

        return graded

    def pair() -> list[Any]:
        for path in tmp_path.iterdir():
            path.unlink()
        return [meets("a", "b"), meets("b", "a")]

    with working(2) as workers:
        assert score(pair(), workers, Faults(timeout=PATIENCE_S), chunk=None)[0] == [[1.0] * 5] * 2
    with working(1) as workers, pytest.raises(RewardError, match=r"no answer within reward_timeout=0\.3"):
        score(pair(), workers, Faults(timeout=0.3), chunk=None)


def test_asynchronous_functions_stay_in_the_training_process():
    async def later(completions, **kwargs):
        return process_id(completions)

    with working() as workers:
        rewards, _ = score([later, process_id], workers)
    assert rewards[0] == [os.getpid()] * 5
    assert rewards[1] != [os.getpid()] * 5


def test_random_numbers_of_a_call_depend_on_the_run_and_its_place_alone(tmp_path):
    """For other numbers of workers: tests/invariance/test_reward_workers.py."""
    failed = tmp_path / "failed"

    def drawn(completions, **kwargs):
        import numpy as np  # in the worker, for the first time in its first call

        if len(completions) == 1 and not failed.exists():
            failed.touch()
            raise ConnectionError
        return [random.random() + np.random.random() for _ in completions]

    def draw(seed: int = 0, step: int = 3) -> list[float | None]:
        with working(1, seed) as workers:
            return score([drawn], workers, Faults(retries=1), state=TrainerState(global_step=step))[0][0]

    retried = draw()
    assert failed.exists()
    assert draw() == retried
    assert len({*retried, *draw(seed=1), *draw(step=4)}) == 15  # the control


# ---- What a worker is -----------------------------------------------------------------------------------------------


def test_a_worker_is_a_fresh_interpreter_of_one_thread_without_an_accelerator_and_no_part_of_a_launch(monkeypatch):
    def found(completions, trainer_state, log_extra, **kwargs):
        names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "ACCELERATE_USE_CPU", "OTHER")
        modules = [name in sys.modules for name in ("torch", "transformers", __name__)]
        log_extra("found", [[os.environ.get(name) for name in names], modules, sys.stdin.read(), trainer_state])
        return [0.0] * len(completions)

    for name in ("OMP_NUM_THREADS", "WORLD_SIZE", "ACCELERATE_USE_CPU", "OTHER"):
        monkeypatch.setenv(name, "4")
    logged: list[Any] = []
    with working() as workers:
        recorders = {"log_extra": lambda _, values: logged.append(values)}  # the user's: called in this process
        _, calls = score([found], workers, chunk=None, state=TrainerState(), recorders=recorders)
    assert calls[0].columns == {}
    variables, modules, stdin, state = logged[0]
    assert variables == ["1", "", None, None, "4"]
    assert modules == [False, False, False]
    assert stdin == ""
    assert vars(state) == vars(TrainerState())


def test_a_timed_call_runs_in_the_main_thread_and_what_it_forks_can_be_terminated():
    def alarmed(completions, **kwargs):
        signal.signal(signal.SIGALRM, lambda *_: None)  # in the main thread alone
        other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
        other.start()
        other.terminate()
        other.join()
        return [other.exitcode] * len(completions)

    with working() as workers:
        assert score([alarmed], workers, Faults(timeout=PATIENCE_S))[0][0] == [-signal.SIGTERM] * 5


def test_a_worker_that_a_cluster_terminates_is_replaced_and_its_call_made_again_once(tmp_path):
    def terminated(times: int) -> Callable[..., Any]:
        def graded(completions, **kwargs):
            tries = tmp_path / str(times)
            tries.open("a").write(".")
            if len(tries.read_text()) <= times:
                os.kill(os.getpid(), signal.SIGTERM)
            return [1.0] * len(completions)

        return graded

    with working() as workers:
        assert score([terminated(1)], workers, chunk=None)[0][0] == [1.0] * 5
        with pytest.raises(RewardError, match=r"SIGTERM\(-15\); .*reward_on_failure='none' goes on without"):
            score([terminated(2)], workers, chunk=None)


def test_a_function_that_cannot_be_loaded_ends_the_run_at_once(monkeypatch, caplog):
    module = types.ModuleType("made_up_here")
    exec("def graded(completions, **kwargs): return []", vars(module))
    monkeypatch.setitem(sys.modules, "made_up_here", module)
    says = r"'function_0' cannot be loaded .*No module named 'made_up_here'\); define it in the script or in a module"
    with working() as workers, pytest.raises(ConfigError, match=says):
        score([module.graded], workers, Faults(retries=2, on_failure="none"))
    assert "follows" not in caplog.text


def test_the_time_of_a_call_begins_once_its_function_is_loaded(monkeypatch, tmp_path):
    text = """
        import sys, time
        if "torch" not in sys.modules:  # in the worker
            time.sleep(3)
        def graded(completions, **kwargs): return [1.0] * len(completions)
    """
    (tmp_path / "slow_to_import.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    graded = importlib.import_module("slow_to_import").graded
    with working() as workers:
        assert score([graded], workers, Faults(timeout=2.0))[0] == [[1.0] * 5]
