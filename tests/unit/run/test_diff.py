"""The comparison of two trails, and reading one: rounding is told from a difference, and nothing is hidden."""

import json
import math
from typing import Any

import pytest

from grpo_ext.errors import ConfigError
from grpo_ext.run.trail import TRAIL, ReadTrail, read_trail
from grpo_ext.run.trail_comparison import compare_trails, relative


def trail(*places: float, first: int = 0, norm: float = 1.0, **values: Any) -> ReadTrail:
    """A trail whose only group of weights is at these places from step `first` on."""
    lines = {
        step: {"values": {"grad_norm": norm, **values}, "weights": {"g": [str(place), [place] * 8]}}
        for step, place in enumerate(places, first)
    }
    return ReadTrail({}, lines)


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


def test_a_value_that_only_one_run_logs_is_a_note():
    found = compare_trails(trail(0.0, 1.0, kl=0.5), trail(0.0, 1.0, **{"time/rollout": 2.0}), half=False)
    assert (found.verdict, found.notes) == ("same bits", ["Only A logs kl."])


def test_numbers_have_the_digits_that_tell_them_apart():
    found = compare_trails(trail(1.0, first=1, loss=1 / 3), trail(1.0, first=1, loss=0.3334), half=False, exact=True)
    assert found.first is not None
    assert found.first.what == "loss is 0.3333 and 0.3334"


def test_an_exact_comparison_takes_no_difference_for_rounding():
    pair = trail(0.0, 1.0), trail(0.0, 1.0 + 1e-9)
    assert compare_trails(*pair, half=False).verdict == "rounding"
    first = compare_trails(*pair, half=False, exact=True).first
    assert first is not None
    assert (first.stage, first.step) == ("weights", 1)


def test_two_values_that_are_no_numbers_are_equal_and_any_other_is_not():
    assert relative(math.nan, math.nan) == 0.0
    assert relative(math.nan, 1.0) == relative(1.0, None) == math.inf
    assert relative(4.0, 5.0) == pytest.approx(0.2)


ROUND = {"count": 1, "rows": [0], "group": 1, "prompts": ["a"], "completions": ["b"], "rewards": {"r": [1.0]}}
ROLLOUT = {"rollout": 1, "rounds": [ROUND], "chosen": None, "advantages": [0.5]}
STEP = {"step": 1, "values": {"loss": 1.0}, "weights": {"g": ["a", [0.0] * 8]}}


@pytest.mark.parametrize(
    "damaged",
    [
        7,
        {"step": 1},
        {**STEP, "weights": None},
        {**STEP, "weights": {"g": ["a", [0.0] * 7]}},
        {**STEP, "weights": {"g": None}},
        {**ROLLOUT, "rounds": [{**ROUND, "group": 0}]},
        {**ROLLOUT, "rounds": [{**ROUND, "rewards": []}]},
        {**ROLLOUT, "advantages": None},
        {"begin": "x"},
    ],
    ids=str,
)
def test_a_line_that_was_damaged_is_named(tmp_path, damaged):
    path = tmp_path / TRAIL
    path.write_text("".join(f"{json.dumps(line)}\n" for line in ({"begin": 0}, ROLLOUT, damaged, STEP)))
    with pytest.raises(ConfigError, match=f"{TRAIL}: line 3 is not as it was written"):
        read_trail(path)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in ({"begin": 0}, ROLLOUT, STEP)) + '{"step": 2, "val')
    assert list(read_trail(path).steps) == [1]
