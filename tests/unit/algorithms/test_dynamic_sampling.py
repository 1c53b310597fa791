"""Dynamic sampling: every place has one group, none that teaches is thrown away, log values are those of all rounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.algorithms.dynamic_sampling import combine_metrics, fill_places


def test_places_are_filled_in_order():
    places, free = fill_places([[True, False, False, True], [False, True], [True]])
    assert places == [(0, 0), (1, 1), (2, 0), (0, 3)]
    assert free == 0


def test_what_is_not_replaced_keeps_its_group():
    assert fill_places([[False, True, False], [True, False]]) == ([(1, 0), (0, 1), (0, 2)], 1)
    assert fill_places([[True, True]]) == ([(0, 0), (0, 1)], 0)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.lists(st.lists(st.booleans(), max_size=12), max_size=5))
def test_nothing_that_teaches_is_lost_and_nothing_comes_twice(first, later):
    rounds, free = [first], first.count(False)
    for groups in later:
        rounds.append(groups[:free])  # no more than places are free
        free -= rounds[-1].count(True)
    places, left = fill_places(rounds)
    assert left == free
    assert len(places) == len(first)
    assert len(set(places)) == len(places)
    useful = {(number, group) for number, groups in enumerate(rounds) for group, good in enumerate(groups) if good}
    assert useful <= set(places)
    kept = [place for place, source in enumerate(places) if source not in useful]
    assert len(kept) == left
    assert all(places[place] == (0, place) for place in kept)


def test_log_values_are_weighted_by_what_they_were_measured_on():
    rounds = [
        {"reward": 1.0, "completions/min_length": 3.0, "completions/max_length": 9.0, "num_tokens": 50.0},
        {"reward": 0.0, "completions/min_length": 2.0, "completions/max_length": 4.0, "num_tokens": 60.0},
    ]
    found = combine_metrics(rounds, [12, 4])
    expected = {"reward": 0.75, "completions/min_length": 2.0, "completions/max_length": 9.0, "num_tokens": 60.0}
    assert found == expected


def test_terminated_lengths_are_weighted_by_the_completions_that_ended():
    rounds = [
        {"completions/clipped_ratio": 0.75, "completions/mean_terminated_length": 4.0},
        {"completions/clipped_ratio": 0.0, "completions/mean_terminated_length": 10.0},
    ]
    # 2 of 8 ended after 4 tokens on average, 4 of 4 after 10
    assert combine_metrics(rounds, [8, 4])["completions/mean_terminated_length"] == pytest.approx(48 / 6)


def test_a_round_without_completions_that_ended_says_nothing_of_their_lengths():
    ended = {"completions/clipped_ratio": 0.0, "completions/min_terminated_length": 10.0}
    cut = {"completions/clipped_ratio": 1.0, "completions/min_terminated_length": 0.0}  # what TRL logs then
    assert combine_metrics([ended, cut], [16, 4])["completions/min_terminated_length"] == 10.0
    assert combine_metrics([cut, cut], [16, 4])["completions/min_terminated_length"] == 0.0


def test_tool_failures_are_weighted_by_calls():
    many = {"tools/call_frequency": 3.0, "tools/failure_frequency": 0.5}
    few = {"tools/call_frequency": 1.0, "tools/failure_frequency": 0.1}
    # 24 calls with 12 failures, 8 with 0.8
    assert combine_metrics([many, few], [8, 8])["tools/failure_frequency"] == pytest.approx(12.8 / 32)


def test_values_that_are_not_numbers_or_missing_do_not_count():
    rounds = [{"a": math.nan, "b": 1.0}, {"a": 2.0}, {"c": math.nan}]
    found = combine_metrics(rounds, [4, 4, 4])
    assert found["a"] == 2.0
    assert found["b"] == 1.0
    assert math.isnan(found["c"])
