"""One of two processes fails: neither waits for the other."""

from pathlib import Path

import pytest

from tests.distributed import tasks
from tests.support.launch import two_processes

FAILURE = "KeyError: 'no score today'"
REWARD = f"RewardError: reward function 'reward' raised {FAILURE}"


def named(rank: int, error: str) -> str:
    return f"ProcessError: process {rank} failed: {error}"


@pytest.mark.parametrize(
    ("place", "ranks", "errors"),
    [
        ("reward", "1", (named(1, REWARD), REWARD)),
        # the other compares its first forwards with this one, and only then hears of the failure
        ("rollout", "0", (FAILURE, named(0, FAILURE))),
    ],
)
def test_a_failure_leaves_no_process_waiting_and_is_named(tmp_path, place, ranks, errors):
    status, output = two_processes(Path(tasks.__file__), str(tmp_path), "failure", place, *ranks, timeout=150)
    assert status, output[-3000:]
    for error, begins in zip(tasks.results(tmp_path), errors, strict=True):
        assert error.startswith(begins)
    assert len(ranks) == 1 or "ProcessError" not in output
