"""One of two processes fails: neither waits for the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import two_processes

SCRIPT = Path(__file__).with_name("failing.py")
REWARD = "RewardError: reward function 'reward' raised KeyError: 'no score today'"
LOSS = "KeyError: 'no score today'"


def raised(folder: Path, place: str, ranks: str) -> tuple[list[str], str]:
    """What each process has raised, with its type, and what all of them printed."""
    status, output = two_processes(SCRIPT, str(folder), place, ranks, timeout=150)
    assert status, output[-3000:]
    return [": ".join(json.loads((folder / f"{rank}.json").read_text())) for rank in (0, 1)], output


def test_a_failure_in_a_rollout_is_named_by_the_other_process(tmp_path):
    (first, second), _ = raised(tmp_path, "reward", "1")
    assert first.startswith(f"ProcessError: process 1 failed: {REWARD}")
    assert second.startswith(REWARD)


def test_a_failure_in_the_loss_leaves_none_waiting(tmp_path):
    (_, second), _ = raised(tmp_path, "loss", "1")
    assert second.startswith(LOSS)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_fails_in_the_first_rollout_leaves_none_waiting(tmp_path, rank):
    # the other compares its first forwards with this one, and only then hears of the failure
    errors, _ = raised(tmp_path, "rollout", rank)
    failure = "KeyError: 'no score today'"
    assert errors[int(rank)] == failure
    assert errors[1 - int(rank)] == f"ProcessError: process {rank} failed: {failure}"


def test_what_fails_on_all_processes_is_said_by_each_as_its_own(tmp_path):
    errors, output = raised(tmp_path, "reward", "0,1")
    assert all(error.startswith(REWARD) for error in errors)
    assert "ProcessError" not in output
