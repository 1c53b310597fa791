"""pass@k: the estimator is the share of draws that hold a passed completion, and its mean is over prompts."""

import math
from itertools import combinations, product

import pytest

from grpo_ext.algorithms.pass_at_k import are_pass_or_fail, pass_at_k, pass_metrics

NAN = math.nan


@pytest.mark.parametrize("scored", range(1, 8))
def test_the_estimator_is_the_share_of_draws_with_a_passed_completion(scored):
    for passed, k in product(range(scored + 1), range(1, scored + 1)):
        outcomes = [i < passed for i in range(scored)]
        draws = [any(draw) for draw in combinations(outcomes, k)]
        assert pass_at_k(scored, passed, k) == sum(draws) / len(draws), (scored, passed, k)


def test_completions_that_nobody_scored_do_not_count():
    metrics = pass_metrics([[1.0, NAN, 0.0], [NAN, NAN, 1.0], [NAN, NAN, NAN]], 1.0)
    assert metrics == {"mean@3": 0.75, "pass@1": 0.75, "pass@2": 1.0}  # one prompt has two, none has three
    assert pass_metrics([[NAN, NAN]], 1.0) == {}
    assert pass_metrics([], 1.0) == {}


def test_rewards_that_are_not_0_or_1_need_a_threshold():
    graded = [[0.7, 0.2], [0.1, 0.69]]
    assert pass_metrics(graded, None) == {"mean@2": pytest.approx(0.4225)}
    assert pass_metrics(graded, 0.7) == {"mean@2": pytest.approx(0.4225), "pass@1": 0.25, "pass@2": 0.5}
    assert pass_metrics([[1.0, 0.0]], 0.0)["pass@1"] == 1.0
    assert not are_pass_or_fail([1.0, -1.0])
    assert not are_pass_or_fail(graded[0])
    assert are_pass_or_fail([0.0, 1.0, 0.99999994, NAN])


def test_a_reward_equal_to_the_threshold_has_passed_in_float32_too():
    as_float32 = 0.699999988079071
    assert as_float32 < 0.7
    assert pass_metrics([[as_float32, 0.6999]], 0.7)["pass@1"] == 0.5
    assert pass_metrics([[0.99999994, 0.0]], 1.0)["pass@1"] == 0.5  # a weighted sum
