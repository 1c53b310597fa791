"""The comparison of two trails: rounding is told from a difference, and nothing is hidden."""

import math
import subprocess
import sys
from typing import Any

import pytest

from grpo_ext.algorithms.digests import PROJECTIONS
from grpo_ext.run.diff import changes
from grpo_ext.run.record import Record
from grpo_ext.run.rounding import relative
from grpo_ext.run.trail_comparison import compare_trails
from tests.support.launch import ROOT


def trail(*places: float, first: int = 0, norm: float = 1.0, **values: Any) -> Record:
    """A trail whose only group of weights is at these places from step `first` on."""
    lines = {
        step: {"values": {"grad_norm": norm, **values}, "weights": {"g": [str(place), [place] * PROJECTIONS]}}
        for step, place in enumerate(places, first)
    }
    return Record(steps=lines)


def test_what_training_has_changed_is_measured_from_the_trail_that_begins_earlier():
    whole, resumed = trail(*range(12)), trail(*(place + 1e-4 for place in range(8, 12)), first=8)
    for pair in ((whole, resumed), (resumed, whole)):
        found = compare_trails(*pair, half=False)
        assert (found.verdict, found.steps) == ("rounding", 4)
        assert found.largest["weights"] == pytest.approx(1e-4 / 8, rel=1e-3)  # at step 8, the first that both have


@pytest.mark.parametrize(("norm", "verdict"), [(1e-9, "rounding"), (0.0, "rounding"), (1.0, "different")])
def test_no_verdict_comes_from_weights_where_all_gradients_are_rounding(norm, verdict):
    found = compare_trails(trail(0.0, 1e-7, norm=norm), trail(0.0, -1e-7, norm=norm), half=False)
    assert found.verdict == verdict


def test_data_that_another_version_noted_in_another_way_is_a_difference():
    one, other = {"rows": 3, "rows_sha256": "a"}, {"rows": 3, "by_column": {"prompt": "b"}}
    assert ("data.rows_sha256", "a", None) in changes({"data": one}, {"data": other})


def test_a_value_that_only_one_run_logs_is_a_note():
    found = compare_trails(trail(0.0, 1.0, kl=0.5), trail(0.0, 1.0, **{"time/rollout": 2.0}), half=False)
    assert (found.verdict, found.notes) == ("same bits", ["Only A logs kl."])


def test_numbers_have_the_digits_that_tell_them_apart():
    found = compare_trails(trail(1.0, first=1, loss=1 / 3), trail(1.0, first=1, loss=0.3334), half=False)
    assert found.begins is not None
    assert found.begins.what == "loss is 0.3333 and 0.3334"


def test_the_first_difference_that_is_rounding_is_named():
    found = compare_trails(trail(0.0, 1.0), trail(0.0, 1.0 + 1e-9), half=False)
    assert (found.verdict, found.first) == ("rounding", None)
    assert found.begins is not None
    assert (found.begins.stage, found.begins.step) == ("weights", 1)


def test_the_same_weights_with_projections_that_round_otherwise_are_the_same():
    runs = trail(0.5, 1.0), trail(0.5, 1.0)
    for line in runs[1].steps.values():
        line["weights"]["g"][1] = [place + 1e-6 for place in line["weights"]["g"][1]]
    assert compare_trails(*runs, half=False).verdict == "same bits"
    runs[1].steps[0]["weights"]["g"][0] = "another digest"
    assert compare_trails(*runs, half=False).first.what == "those at the start differ"


@pytest.mark.parametrize(("step", "verdict"), [(1, "different"), (2, "rounding")])
def test_values_of_the_first_step_differ_less_in_half_precision(step, verdict):
    """Weights and completions are the same there."""
    one, other = ({s: {"values": {"loss": loss if s == step else 1.0}} for s in (1, 2)} for loss in (1.0, 1.01))
    assert compare_trails(Record(steps=one), Record(steps=other), half=True).verdict == verdict


def test_two_values_that_are_no_numbers_are_equal_and_any_other_is_not():
    assert relative(math.nan, math.nan) == 0.0
    assert relative(math.nan, 1.0) == relative(1.0, None) == math.inf
    assert relative(4.0, 5.0) == pytest.approx(0.2)


def rewarded(*rewards: float) -> Record:
    """A record of one rollout batch of two groups."""
    part = {"count": 4, "group": 2, "rows": [0, 1], "prompts": ["a", "b"], "completions": ["c"] * 4}
    line = {"rounds": [{**part, "rewards": {"r": [*rewards]}}], "chosen": None, "advantages": [0.0] * 4}
    return Record(rollouts={1: line}, steps={1: {"values": {}}})


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        ((1e-7, 0.0, 2e-7, 0.0), (2e-7, 0.0, 2e-7, 0.0), "different"),
        ((1e6, 1e6 + 2, 5.0, 6.0), (1e6 + 1, 1e6 + 2, 5.0, 6.0), "different"),
        ((1e6, 1e6, 5.0, 6.0), (1e6, 1e6, 5.0, 6.0 + 5e-7), "rounding"),
        ((2.0, 2.0, 3.0, 3.0), (2.0 + 1e-6, 2.0 + 1e-6, 3.0, 3.0), "rounding"),  # groups without a range
        ((2.0, 2.0, 3.0, 3.0), (4.0, 4.0, 3.0, 3.0), "different"),
    ],
)
def test_rewards_differ_relative_to_the_range_of_their_group(one, other, verdict):
    found = compare_trails(rewarded(*one), rewarded(*other), half=False)
    assert found.verdict == verdict, found.text
    if found.first is not None:
        assert found.first.stage == "rewards"


@pytest.mark.parametrize(
    ("optim", "apart", "verdict"),
    [
        ("adamw_torch", 1e-3, "rounding"),
        ("adamw_torch", 5.0, "different"),
        ("sgd", 1e-3, "different"),
    ],
)
def test_without_a_gradient_weights_differ_by_no_more_than_a_step_can_move_them(optim, apart, verdict):
    def moved(by: float) -> Record:
        record = trail(0.0, by, norm=1e-9, learning_rate=1e-3)
        record.starts = [{"step": 0, "settings": {"optim": optim}, "trained_parameters": 100}]
        return record

    found = compare_trails(moved(0.0), moved(apart), half=False)
    assert found.verdict == verdict, found.text


def test_comparing_imports_neither_torch_nor_trl():
    heavy = {"torch", "trl", "transformers", "pandas"}
    code = f"import sys; import grpo_ext.run.diff; print(*{heavy}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""
