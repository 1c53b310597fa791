"""Rollouts that run ahead of training (`rollout_lag`): which weights sample what is fixed, and nothing else matters.

The matrix (test_matrix.py) has its losses, terms and models for every split.
"""

import itertools
from typing import Any

import pytest

from grpo_ext.errors import LaunchError
from grpo_ext.tools.check.comparison import update_error
from grpo_ext.tools.check.runs import Run
from tests.support.cases import Bench
from tests.support.kills import dying, failing_on, jittery, watched_collectives
from tests.support.launches import SAVE, Trained, assert_same_run, long_run, run_all
from tests.support.tiny import sparse_reward
from tests.tolerances import DIFFERENT

full = pytest.mark.full
PROMPTS, STEPS = 10, 6  # two epochs, each of a rollout of two steps and a smaller one of a single step
EXACT = {
    **{"bitwise_invariant": True, "beta": 0.0, "num_iterations": 1, "max_steps": STEPS},
    "save_strategy": "no",
}
TERMS: dict[str, dict[str, Any]] = {
    "max_rl": {"advantage_estimator": "max_rl", "rewards": (sparse_reward,)},
    "pass_at_k": {"advantage_estimator": "pass_at_k", "advantage_k": 2, "rewards": (sparse_reward,)},
    "optimal_baseline": {"advantage_estimator": "optimal_baseline"},
    "trust_tv": {"trust_region": "tv", "trust_region_threshold": 1e-3},
    "trust_kl": {"trust_region": "kl", "trust_region_threshold": 2e-5},
    "sequence_mask": {"sequence_mask_low": 0.98, "sequence_mask_high": 1.02},
    "own_loss": {"loss_type": "topr_near"},
    "teacher": {"teacher_kl_coef": 0.5},
}
DYNAMIC = {"dynamic_sampling": True, "rewards": (sparse_reward,)}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("ahead"))


def lagged(bench: Bench, name: str, lag: int, size: int = 16, **changes: Any) -> Run:
    settings = {**EXACT, "data_path": bench.data(PROMPTS), "rollout_lag": lag, **changes}
    return long_run(bench, bench.folder, name, size, **settings)


@pytest.fixture(scope="module")
def whole(bench, request) -> dict[str, Trained]:
    runs = [lagged(bench, "lag0", 0), *(lagged(bench, f"lag{lag}", lag, **SAVE) for lag in (1, 2))]
    if request.config.getoption("--full"):
        runs.append(lagged(bench, "dynamic", 1, **DYNAMIC))
    return {run.name: result for run, result in zip(runs, run_all(runs, processes=1))}


def test_another_lag_learns_something_else(whole):
    for one, other in itertools.combinations(("lag0", "lag1", "lag2"), 2):
        assert whole[one].error is None, whole[one].error
        assert update_error(whole[one].delta, whole[other].delta) > DIFFERENT


@pytest.mark.parametrize(("processes", "size"), [(2, 3), pytest.param(4, 1, marks=full)])
def test_the_same_bits_for_every_split_and_nothing_is_gathered_beside_training(bench, whole, processes, size):
    changes: dict[str, dict[str, Any]] = {
        **{"lag1": {"lag": 1}, "dynamic": {"lag": 1, **DYNAMIC}},
        # its reward watches the collectives of the processes from there on
        "lag2": {"lag": 2, "rewards": (watched_collectives(),)},
    }
    names = [name for name in changes if name in whole]
    runs = [lagged(bench, f"{name}-on-{processes}", size=size, **changes[name]) for name in names]
    for name, result in zip(names, run_all(runs, processes), strict=True):
        assert_same_run(whole[name], result, 0, STEPS)


@full
@pytest.mark.parametrize(("processes", "times", "longest"), [(2, 1, 0.05), (2, 5, 0.3)])
def test_delays_change_nothing(bench, whole, processes, times, longest):
    runs = [
        lagged(bench, f"jitter{lag}-{processes}-{n}", lag, 8, rewards=(jittery(longest),))
        for n in range(times)
        for lag in (1, 2)
    ]
    for number, result in enumerate(run_all(runs, processes)):
        assert_same_run(whole[f"lag{1 + number % 2}"], result, 0, STEPS)


@pytest.mark.parametrize(
    ("lag", "processes", "steps"),
    [(2, 2, (3, 4)), *(pytest.param(*row, marks=full) for row in ((1, 1, (1, 2, 3)), (2, 3, (1, 2, 3, 5))))],
)
def test_a_resumed_run_trains_the_rollout_batches_that_were_sampled_ahead(bench, whole, lag, processes, steps):
    saved = bench.folder / f"lag{lag}"
    runs = [
        lagged(bench, f"lag{lag}-from-{step}", lag, 5, resume_from=str(saved / f"checkpoint-{step}")) for step in steps
    ]
    for step, result in zip(steps, run_all(runs, processes)):
        assert_same_run(whole[f"lag{lag}"], result, step, STEPS)


@full
@pytest.mark.parametrize("lag", [0, 1])
def test_every_term_has_the_same_bits_from_another_layout(bench, lag):
    def runs(size: int, suffix: str, resume: bool) -> list[Run]:
        found = []
        for name, settings in TERMS.items():
            teacher = {"teacher_model": bench.model("llama")} if name == "teacher" else {}
            saved = {"resume_from": str(bench.folder / f"{name}{lag}" / "checkpoint-3")} if resume else SAVE
            found.append(lagged(bench, f"{name}{lag}{suffix}", lag, size, **settings, **teacher, **saved))
        return found

    straight, resumed = run_all(runs(16, "", False), processes=1), run_all(runs(3, "-again", True), processes=2)
    for name, one, other in zip(TERMS, straight, resumed):
        assert_same_run(one, other, 3, STEPS)
        assert not name.startswith(("trust", "sequence")) or any(left_out(line) for line in one.log)
    deltas = [one.delta for one in straight]
    assert all(update_error(one, other) > DIFFERENT for one, other in itertools.combinations(deltas, 2))


def left_out(line: dict[str, float]) -> float:
    """The share of tokens or completions that a step leaves out, zero if that is all of them."""
    share = line.get("trust_region/left_out", line.get("sequence_mask/left_out", 0.0))
    return share * (share < 1)


@full
def test_a_run_that_was_killed_goes_on_elsewhere(bench, whole):
    with pytest.raises(LaunchError):
        run_all([lagged(bench, "killed", 2, rewards=(dying("optimizer", 4, 1),), **SAVE)], processes=2)
    (result,) = run_all([lagged(bench, "killed", 2, 3, resume_from="latest")], processes=1)
    assert_same_run(whole["lag2"], result, STEPS - len(result.trace), STEPS)
    assert 0 < len(result.trace) < STEPS


@full
def test_an_error_of_one_process_ends_all(bench):
    with pytest.raises(LaunchError, match="the judge is out"):
        run_all([lagged(bench, "failing", 1, rewards=(failing_on(1, 3),))], processes=2)
