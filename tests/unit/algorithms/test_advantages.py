"""Advantages against a plain formula; tests/parity compares them with stock TRL.

Dynamic sampling: every place has one group, and no group that teaches is thrown away.
"""

import itertools
import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.algorithms import advantages
from grpo_ext.algorithms.advantages import EPSILON, AdvantageRule, fill_places, register_advantage_estimator
from grpo_ext.errors import ConfigError

NAN = math.nan


def group_advantages(rewards, weights, generations, scale="group", aggregation="sum_then_normalize"):
    return AdvantageRule(weights, generations, None, scale, aggregation).advantages(rewards, ())


REWARDS = st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.25, NAN]), min_size=4, max_size=4)


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_an_advantage_is_the_centred_reward_over_its_scale(scale, groups):
    def scored(values: list[float]) -> list[float]:
        return [value for value in values if not math.isnan(value)]

    expected, all_of_them = [], scored([value for group in groups for value in group])
    for group in groups:
        own = scored(group)
        divisor = 1.0 if scale == "none" else spread(own if scale == "group" else all_of_them) + EPSILON
        expected += [0.0 if math.isnan(value) else (value - statistics.mean(own)) / divisor for value in group]
    rewards = torch.tensor(groups, dtype=torch.float64).view(-1, 1)
    assert group_advantages(rewards, torch.ones(1), 4, scale).tolist() == pytest.approx(expected, abs=1e-9)


def test_part_of_a_batch_has_other_advantages_under_batch_scaling():
    # why advantages are computed before anything is split
    rewards = torch.randn(24, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = group_advantages(rewards, torch.ones(2), 4, "batch")[:12]
    assert (group_advantages(rewards[:12], torch.ones(2), 4, "batch") - together).abs().max() > 1e-3


# ---- Named estimators -----------------------------------------------------------------------------------------------


def column(*rewards: float) -> torch.Tensor:
    return torch.tensor(rewards, dtype=torch.float64)[:, None]


def estimated(name: str, *rewards: float, group: int = 4, lengths: Any = (), **settings: Any) -> list[float]:
    masks = [torch.ones(length) for length in lengths]
    return AdvantageRule(torch.ones(1), group, name, **settings).advantages(column(*rewards), masks).tolist()


def test_leave_one_out_by_hand():
    # each reward minus the mean of the three others
    assert estimated("leave_one_out", 1, 0, 0, 3) == pytest.approx([0.0, -4 / 3, -4 / 3, 8 / 3])
    assert estimated("leave_one_out", 1, NAN, 0, 3) == pytest.approx([-0.5, 0.0, -2.0, 2.5])
    assert estimated("leave_one_out", 1, NAN, NAN, NAN) == [0.0] * 4


def test_reinforce_plus_plus_with_baseline_by_hand():
    # centred: 1, -1, 3, -3; their standard deviation with Bessel's correction is sqrt(20 / 3)
    std = math.sqrt(20 / 3) + EPSILON
    actual = estimated("reinforce_plus_plus_baseline", 2, 0, 7, 1, group=2)
    assert actual == pytest.approx([1 / std, -1 / std, 3 / std, -3 / std])


def test_max_rl_by_hand():
    # the numbers of prime-rl's MaxRLAlgorithm (559b4477) on the first two groups
    assert estimated("max_rl", 1, 0, 0, 0, *(0,) * 4) == [3.0, -1.0, -1.0, -1.0, *(0.0,) * 4]
    assert estimated("max_rl", 0.5, NAN, 1.5, 0.25) == pytest.approx([-1 / 3, 0.0, 1.0, -2 / 3], abs=1e-12)
    assert estimated("max_rl", *(NAN,) * 4) == [0.0] * 4
    assert advantages.ESTIMATORS["max_rl"](torch.full((1, 7), 0.1)).tolist() == [
        [0.0] * 7
    ]  # computed in float32 it is not
    with pytest.raises(ConfigError, match=r"a reward is -0\.5; return rewards of 0 or more"):
        estimated("max_rl", 1, NAN, -0.5, 0)


EQUAL = ("group_standardized", "group_centered", "leave_one_out", "max_rl")
RULES: list[dict[str, Any]] = [{"estimator": name} for name in EQUAL]
RULES += [*({"scale_rewards": scale} for scale in ("group", "none", "batch")), {"aggregation": "normalize_then_sum"}]


@pytest.mark.parametrize("settings", RULES, ids=lambda settings: "".join(settings.values()))
@given(
    st.lists(st.floats(0.0078125, 1000, width=32), min_size=1, max_size=5),
    st.integers(2, 33),
    st.lists(st.sampled_from([0.3, 1.0, 2.7]), min_size=5, max_size=5),
    st.integers(0, 40),
)
def test_equal_rewards_give_exactly_zero_in_float32(settings, rewards, generations, weights, unscored):
    """Also of several functions, beside another group, and where some completions were not scored."""
    equal = torch.tensor(rewards).expand(generations, -1).clone()
    if unscored < generations:
        equal[unscored] = NAN
    others = equal * torch.arange(1.0, generations + 1)[:, None]
    batch = equal if "aggregation" in settings else torch.cat([equal, others])
    weights_F = torch.tensor(weights[: len(rewards)])
    advantages_B = AdvantageRule(weights_F, generations, **settings).advantages(batch, ())
    assert not advantages_B[:generations].any()


def test_a_plain_mean_in_float32_does_not():
    rewards = torch.full((1, 16), 100.3)
    assert (rewards - rewards.mean(dim=1, keepdim=True)).any()


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=2, max_size=16).filter(lambda values: len({*values}) > 1))
def test_other_rewards_have_the_bits_of_the_plain_formula(rewards):
    rewards_PG = torch.tensor([rewards])
    centred = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    assert torch.equal(advantages.group_centered(rewards_PG), centred)
    count = len(rewards)
    assert torch.equal(advantages.leave_one_out(rewards_PG), centred * count / (count - 1))
    deviation = ((centred**2).sum(dim=1, keepdim=True) / (count - 1)).sqrt()
    assert torch.equal(advantages.group_standardized(rewards_PG), centred / (deviation + EPSILON))


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("rewards", [(1, 0, 0, 0, 1, 0), (1, 1, 1, 1, 0, 1), (0, NAN, 1, 0, 0, NAN), (0,) * 6])
def test_pass_at_k_compares_the_subsets_of_a_completion_with_all_subsets(rewards, k):
    scored = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    best = {subset: max(rewards[i] for i in subset) for subset in itertools.combinations(scored, k)}
    expected = [0.0] * 6
    for i in scored if best else ():
        with_it = [value for subset, value in best.items() if i in subset]
        expected[i] = statistics.mean(with_it) - statistics.mean(best.values())
    actual = estimated("pass_at_k", *rewards, group=6, k=k)
    assert actual == pytest.approx(expected, abs=1e-12)
    if k == 1:
        assert actual == pytest.approx(estimated("group_centered", *rewards, group=6), abs=1e-12)


def test_pass_at_k_has_the_numerators_of_the_paper():
    """The analytical advantages of arXiv 2508.10751 with 3 of 8 rollouts right and k = 4, times their deviation."""
    mean = 1 - 5 / 70
    expected = [1 - mean] * 3 + [1 - mean - 4 / 35] * 5
    assert estimated("pass_at_k", 1, 1, 1, 0, 0, 0, 0, 0, group=8, k=4) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_asks_which_rewards_pass():
    with pytest.raises(ConfigError, match="not all 0 or 1; set eval_pass_threshold"):
        estimated("pass_at_k", 0.5, 1, 0, 0, k=2)
    passing = estimated("pass_at_k", 0.5, 3, -1, 0.2, k=2, pass_threshold=0.5)
    assert passing == estimated("pass_at_k", 1, 1, 0, 0, k=2)
    assert passing != estimated("pass_at_k", 0.5, 3, -1, 0.2, k=2, pass_threshold=0.2)


def test_groups_that_teach_nothing_at_k():
    rewards = column(*(0, 1, 1, 1), *(0, 0, 1, 1), *(0,) * 4, *(1,) * 4)
    constant = AdvantageRule(torch.ones(1), 4, "pass_at_k", k=2).constant_groups(rewards)
    assert constant.tolist() == [True, False, True, True]  # with one failure every pair has a pass
    assert AdvantageRule(torch.ones(1), 4, "group_centered").constant_groups(rewards).tolist()[0] is False


def test_the_optimal_baseline_is_weighted_by_tokens_with_loss():
    # the numbers of verl's compute_opo_outcome_advantage (1dda039b) on the same inputs
    actual = estimated("optimal_baseline", 1, 0, 0.5, 2, lengths=(3, 1, 4, 2))
    assert actual == pytest.approx([0.1, -0.9, -0.4, 1.1], abs=1e-6)
    # completions without a score or without a token that carries loss have no weight
    assert estimated("optimal_baseline", 1, NAN, 0.5, 2, lengths=(2, 9, 2, 0)) == pytest.approx([0.25, 0, -0.25, 1.25])
    assert estimated("optimal_baseline", 1, 0, 0, 2, lengths=(0,) * 4) == [0.0] * 4
    # equal rewards give exactly zero, so that such a group is not run
    assert estimated("optimal_baseline", *(0.1,) * 4, lengths=(3, 7, 11, 5)) == [0.0] * 4


@pytest.fixture
def estimators(monkeypatch) -> dict[str, Any]:
    """The registered estimators; what a test changes is undone at its end."""
    monkeypatch.setattr(advantages, "ESTIMATORS", dict(advantages.ESTIMATORS))
    return advantages.ESTIMATORS


def test_an_estimator_of_ones_own_takes_five_lines(estimators):
    @register_advantage_estimator("best_of_group")
    def best_of_group(rewards_PG):
        best = (rewards_PG == rewards_PG.amax(1, keepdim=True)).float()
        return best - best.mean(1, keepdim=True)

    assert estimated("best_of_group", 1, 2, 3, 0, 5, 5, 0, 0) == [-0.25, -0.25, 0.75, -0.25, 0.5, 0.5, -0.5, -0.5]
    with pytest.raises(ConfigError, match=r"'group_centered' comes with grpo_ext; choose another name"):
        register_advantage_estimator("group_centered")(torch.zeros_like)


def test_an_estimator_with_a_keyword_gets_lengths(estimators):
    @register_advantage_estimator("shorter")
    def shorter(rewards_PG, lengths_PG):
        return rewards_PG / lengths_PG

    assert estimated("shorter", 1, 1, 1, 0, lengths=(1, 2, 4, 8)) == [1.0, 0.5, 0.25, 0.0]
    estimators["sign"] = torch.sign  # a function of C, which has no signature
    assert estimated("sign", 2, -3, 0, 1) == [1.0, -1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("returning", "message"),
    [
        (lambda r: r.mean(1), r"returned \(2,\) for rewards of shape \(2, 4\)"),
        (lambda r: r / 0, "returned nan for completion 0 of group 0, whose reward is 0"),
        (lambda r: r.tolist(), "returned list"),
    ],
)
def test_an_estimator_that_returns_something_else_is_named(estimators, returning, message):
    estimators["broken"] = returning
    with pytest.raises(ConfigError, match=message):
        estimated("broken", 0, 1, 2, 3, 0, 1, 2, 3)


def test_an_estimator_that_writes_to_its_rewards_scores_no_unscored_completion(estimators):
    def filling(rewards):
        rewards[torch.isnan(rewards)] = 0
        return rewards - rewards.mean(1, keepdim=True)

    estimators["filling"] = filling
    assert estimated("filling", 1, NAN, 1, 1) == [0.25, 0.0, 0.25, 0.25]


def test_groups_without_variance():
    rewards = column(*(1, 1, 1, 1), *(0, 1, 1, 1), *(NAN,) * 4, *(NAN, 2, NAN, NAN), *(NAN, 2, 3, NAN))
    constant = AdvantageRule(torch.ones(1), 4).constant_groups(rewards)
    assert constant.tolist() == [True, False, True, True, False]
    # rewards that cancel have none in their sum, and have it apart
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert AdvantageRule(torch.ones(2), 2).constant_groups(rewards).tolist() == [True]
    apart = AdvantageRule(torch.ones(2), 2, aggregation="normalize_then_sum")
    assert apart.constant_groups(rewards).tolist() == [False]
    # a function of weight zero teaches nothing
    assert replace(apart, weights_F=torch.tensor([0.0, 0.0])).constant_groups(rewards).tolist() == [True]


# ---- Dynamic sampling -----------------------------------------------------------------------------------------------


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
    constant = [place for place, source in enumerate(places) if source not in useful]
    assert len(constant) == left
    assert all(places[place] == (0, place) for place in constant)
