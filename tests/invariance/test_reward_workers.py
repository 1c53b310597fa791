"""`reward_workers`: the same bits and the same logs for every number of them on every number of training processes."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from grpo_ext.tools.check.comparison import update_error
from tests.support.cases import Bench
from tests.support.launches import Trained, metric_difference, run_all
from tests.tolerances import DIFFERENT

pytestmark = pytest.mark.full  # in `make test`: tests/unit/rewards/test_workers.py
WORKERS = (0, 1, 2)


def functions(draws: bool) -> tuple[Callable[..., Any], ...]:
    """Functions that go to a worker by value: they look beyond the group, log, and may draw random numbers."""

    def beyond(completions, log_metric, **kwargs):
        mean = sum(map(len, completions)) / len(completions)
        log_metric("mean_length", mean)
        return [abs(len(text) - mean) for text in completions]

    def drawn(completions, **kwargs):
        return [random.random() if draws else 0.01 * len(text) for text in completions]

    return beyond, drawn


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[tuple[int, int, bool], Trained]:
    bench, found = Bench(tmp_path_factory.mktemp("workers")), {}
    exact = {"bitwise_invariant": True, "trace": True, "max_steps": 2, "logging_steps": 1, "rollout_chunk_size": 4}
    for processes, size in ((1, 16), (2, 3)):
        keys = [(n, draws) for draws in (False, True) for n in WORKERS if n or not draws]
        runs = [
            bench.run("grpo", size, name=f"{n}-{draws}", rewards=functions(draws), reward_workers=n, **exact)
            for n, draws in keys
        ]
        found |= {(processes, *key): result for key, result in zip(keys, run_all(runs, processes))}
    return found


@pytest.mark.parametrize("draws", [False, True])
def test_the_same_bits_for_every_number_of_workers_and_processes(results, draws):
    same = {key: result for key, result in results.items() if key[2] is draws}
    assert len(same) == (4 if draws else 6)
    one = same[1, 1, draws]
    for key, other in same.items():
        assert other.error is None, (key, other.error)
        assert other.trace == one.trace, key
        assert metric_difference(one.log, other.log) == (0.0, ""), key
    assert any("mean_length" in line for line in one.log)


def test_other_rewards_learn_something_else(results):
    assert update_error(results[1, 1, False].delta, results[1, 1, True].delta) > DIFFERENT
