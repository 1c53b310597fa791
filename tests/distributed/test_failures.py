"""One of two processes fails: neither waits for the other."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import tasks
from tests.support.launch import two_processes

FAILURE = "KeyError: 'no score today'"
REWARD = f"RewardError: reward function 'reward' raised {FAILURE}"


def raised(folder: Path, place: str, *ranks: str) -> tuple[list[str], str]:
    """What each process has raised, with its type, and what both of them printed."""
    status, output = two_processes(Path(tasks.__file__), str(folder), "failure", place, *ranks, timeout=150)
    assert status, output[-3000:]
    return tasks.results(folder), output


def test_a_failure_in_a_rollout_is_named_by_the_other_process(tmp_path):
    (first, second), _ = raised(tmp_path, "reward", "1")
    assert first.startswith(f"ProcessError: process 1 failed: {REWARD}")
    assert second.startswith(REWARD)


def test_a_failure_in_the_loss_leaves_none_waiting(tmp_path):
    (_, second), _ = raised(tmp_path, "loss", "1")
    assert second.startswith(FAILURE)


def test_a_process_that_fails_in_the_first_rollout_leaves_none_waiting(tmp_path):
    # the other compares its first forwards with this one, and only then hears of the failure
    (first, second), _ = raised(tmp_path, "rollout", "0")
    assert first == FAILURE
    assert second == f"ProcessError: process 0 failed: {FAILURE}"


def test_each_process_raises_its_own_error_where_all_fail(tmp_path):
    errors, output = raised(tmp_path, "reward", "0", "1")
    assert all(error.startswith(REWARD) for error in errors)
    assert "ProcessError" not in output
