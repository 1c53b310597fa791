"""A run that was stopped anywhere and resumed is the run that was not: the same bits, whatever resumes it."""

from typing import Any

import pytest
from peft import LoraConfig

from grpo_ext.errors import LaunchError
from grpo_ext.run.checkpoint import checkpoints, why_not_resumable
from grpo_ext.run.state import load_state
from grpo_ext.tools.check.comparison import update_error
from grpo_ext.tools.check.runs import Run
from grpo_ext.tools.stock import STOCK
from tests.support.cases import DROPPING, Bench
from tests.support.cuts import Cuts
from tests.support.kills import dying
from tests.support.launches import Trained, assert_same_run, long_run, metric_difference, run_all
from tests.support.selection import few_of
from tests.support.tiny import sparse_reward, stock_scores
from tests.tolerances import ADAM_EPSILON, DIFFERENT, METRIC, UPDATE

STEPS = 12  # two epochs of rollouts of 8 and 2 prompts, steps of 4 (the last one of 2), each rollout used twice
# one epoch of rollouts of 9 and 4 prompts, each used twice; every second step begins within a group
CUT = {"global_batch_size": 18, "rollout_batch_size": 36, "num_train_epochs": 1, "bitwise_invariant": True}
RUNS: dict[str, dict[str, Any]] = {
    "whole": {},
    "exact": {"bitwise_invariant": True, "top_p": 0.8, "sampling_mask": "replay", "max_steps": 10},
    "adaptive": {"use_adaptive_entropy": True, "entropy_target": 5.0, "max_steps": 9},
    "dynamic": {"dynamic_sampling": True, "bitwise_invariant": True, "rewards": (sparse_reward,), "max_steps": 16},
    "cut": CUT,
    "rows": {"bitwise_invariant": True, "cuts": Cuts(), "max_steps": 4},
    "dropout": {"bitwise_invariant": True, "peft": LoraConfig(**DROPPING), "max_steps": 10},
}
PROMPTS = {"dynamic": 22, "cut": 13}  # dynamic sampling draws further prompts
FULL = ("exact", "adaptive", "dynamic", "dropout")  # left to `make test-full`
full = pytest.mark.full


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("resume"))


def run_of(bench: Bench, kind: str, name: str, size: int = 16, **changes: Any) -> Run:
    settings = {"data_path": bench.data(PROMPTS.get(kind, 10)), **RUNS[kind], **changes}
    return long_run(bench, bench.folder, name, size, **settings)


@pytest.fixture(scope="module")
def whole(bench, request) -> dict[str, Trained]:
    """Uninterrupted runs, which leave a checkpoint of every step."""
    names = [name for name in RUNS if name not in FULL or request.config.getoption("--full")]
    runs = [run_of(bench, name, name) for name in names]
    return {run.name: result for run, result in zip(runs, run_all(runs, processes=1))}


def resumed(bench: Bench, name: str, step: int, size: int = 16, **changes: Any) -> Run:
    checkpoint = bench.folder / name / f"checkpoint-{step}"
    return run_of(
        bench, name, f"{name}-from-{step}-{size}", size, resume_from=str(checkpoint), save_strategy="no", **changes
    )


@pytest.mark.parametrize(
    ("name", "processes", "size", "stops"),
    [
        # between the iterations of a rollout batch, after the smaller last step of an epoch, in the next epoch
        ("whole", 1, 16, (3, 6, 11)),
        # inside a rollout batch, after it, around the end of an epoch
        pytest.param("whole", 1, 16, (1, 2, 4, 5, 7), marks=full),
        pytest.param("exact", 3, 3, (8,), marks=full),  # another number of processes
        pytest.param("adaptive", 1, 16, (7,), marks=full),
        # before a rollout batch, in the second epoch
        pytest.param("dynamic", 2, 3, (6, 14), marks=full),
        pytest.param("dropout", 3, 3, (4, 8), marks=full),
        # completions of several rows: after the first step of a rollout batch, and between its iterations
        ("rows", 2, 3, (2,)),
        pytest.param("rows", 3, 5, (1, 3), marks=full),
        ("cut", 2, 5, (1, 2, 5)),  # after the first step of a rollout batch, between its iterations, in the last one
    ],
)
def test_the_same_bits_from_every_kind_of_stop(bench, whole, name, processes, size, stops):
    runs = [resumed(bench, name, step, size) for step in stops]
    for step, result in zip(stops, run_all(runs, processes)):
        assert_same_run(whole[name], result, step, RUNS[name].get("max_steps", 6 if name == "cut" else STEPS))


def test_a_checkpoint_inside_a_rollout_batch_holds_its_rows(bench, whole):
    assert whole["rows"].error is None, whole["rows"].error
    for name, holds in (("rows", True), ("cut", False)):
        state = load_state(bench.folder / name / "checkpoint-2")
        assert state is not None
        assert ("further_rows" in str(state["rollouts"]["batch"])) is holds


@pytest.mark.full
def test_dynamic_sampling_has_replaced_groups(whole):
    assert sum(line.get("dynamic_sampling/replaced_groups", 0) for line in whole["dynamic"].log) > 0


def test_another_layout_goes_on_to_rounding(bench, whole):
    step = 7
    (result,) = run_all([resumed(bench, "whole", step, 3, adam_epsilon=ADAM_EPSILON)], processes=2)
    assert result.error is None, result.error
    assert update_error(whole["whole"].delta, result.delta) <= UPDATE
    lines = [line for line in whole["whole"].log if line["step"] > step]
    gap, name = metric_difference(lines, [line for line in result.log if line["step"] > step])
    assert gap <= METRIC, name


@stock_scores
def test_stock_trl_learns_something_else(bench):
    """The negative control: stopped in the middle of a rollout batch, stock TRL samples again."""
    settings = {"save_strategy": "steps", "save_steps": 1, "rollout_batch_size": 32, "num_iterations": 2}

    def stock(name: str, **changes: Any) -> Run:
        folder = str(bench.folder / name)
        return bench.run("grpo", 16, STOCK, name=name, output_dir=folder, max_steps=5, **settings, **changes)

    saved = str(bench.folder / "stock" / "checkpoint-3")
    one, two = run_all([stock("stock"), stock("again", resume_from=saved)], processes=1)
    assert one.error is None, one.error
    assert two.error is None, two.error
    assert update_error(one.delta, two.delta) > DIFFERENT


# the time at which each moment is cut; in "syncing" the third checkpoint has its listing, and not yet its name
AT = {"rollouts": 3, "rewards": 6, "window": 6, "optimizer": 7, "writing": 4, "listing": 37, "syncing": 38}
AT["publishing"] = 3


@pytest.mark.parametrize("moment", few_of(AT, ("syncing",)))
def test_a_run_that_was_killed_goes_on_with_the_same_bits(bench, whole, moment):
    name = f"killed-{moment}"
    with pytest.raises(LaunchError, match="status -9"):
        run_all([run_of(bench, "whole", name, rewards=(dying(moment, AT[moment]),))], processes=1)
    existing = checkpoints(bench.folder / name)
    assert not any(map(why_not_resumable, existing))  # nothing half-written carries a checkpoint's name
    step = int(existing[-1].name.split("-")[-1])
    assert 0 < step < STEPS - 1
    (result,) = run_all([run_of(bench, "whole", name, resume_from="latest")], processes=1)
    assert result.error is None, result.error
    assert result.trace == whole["whole"].trace[step:]
    assert not list((bench.folder / name).glob("_writing-*"))
    assert len(checkpoints(bench.folder / name)) == STEPS
