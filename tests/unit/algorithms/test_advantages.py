"""Advantages: TRL's own lines give the same numbers; zero mean per group; unscorable ones get exactly zero.

Dynamic sampling: every place has one group, none that teaches is thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from grpo_ext.algorithms.advantages import (
    EPSILON,
    ESTIMATORS,
    AdvantageRule,
    fill_places,
    register_advantage_estimator,
)
from grpo_ext.errors import ConfigError
from tests.support.trl_lines import compiled_lines

MODES = [
    ("group", "sum_then_normalize"),
    ("batch", "sum_then_normalize"),
    ("none", "sum_then_normalize"),
    ("group", "normalize_then_sum"),
]
NAN = math.nan
# TRL takes Bessel's correction from a float32 quotient: 2^-24 and a bit, of each of the terms whose sum may cancel
TRL_ROUNDING = {"rtol": 2e-7, "atol": 1e-7}


TRL_LINES = compiled_lines(
    "_generate_and_score_completions",
    "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)",
    "# Slice to keep only the local part of the data",
)


def trl_advantages(rewards, weights, num_generations, scale, aggregation) -> torch.Tensor:
    names = {
        "torch": torch,
        "nanstd": nanstd,
        "device": rewards.device,
        "num_generations": num_generations,
        "rewards_per_func": rewards.clone(),
        "self": SimpleNamespace(
            multi_objective_aggregation=aggregation,
            scale_rewards=scale,
            reward_weights=weights,
            reward_funcs=[None] * rewards.size(1),
        ),
    }
    exec(TRL_LINES, names)
    return names["advantages"]


def group_advantages(rewards, weights, generations, scale="group", aggregation="sum_then_normalize"):
    return AdvantageRule(None, scale, aggregation).advantages(rewards, weights, generations)


def batch(groups: int, generations: int, functions: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(groups * generations, functions, generator=generator, dtype=torch.float64)


@st.composite
def reward_batches(draw):
    """Rewards as programs give them (few distinct values, `None`s), group size (1 in an evaluation), weights."""
    generations, groups, columns = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    value = st.sampled_from([0.0, 1.0, -1.0, 0.5, 0.1, 3.25])
    cell = st.one_of(value, st.just(NAN))
    rows = draw(
        st.lists(
            st.lists(cell, min_size=columns, max_size=columns),
            min_size=generations * groups,
            max_size=generations * groups,
        )
    )
    weights = draw(st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0]), min_size=columns, max_size=columns))
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(weights), generations


# ---- TRL's numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "aggregation"), MODES)
@given(reward_batches())
def test_advantages_are_trls(scale, aggregation, rewards_weights_generations):
    rewards, weights, generations = rewards_weights_generations
    ours = group_advantages(rewards, weights, generations, scale, aggregation)
    theirs = trl_advantages(rewards, weights, generations, scale, aggregation)
    torch.testing.assert_close(ours, theirs, **TRL_ROUNDING)
    assert torch.isfinite(ours).all()


def test_an_oracle_with_another_epsilon_would_be_noticed():
    rewards = batch(groups=4, generations=4, functions=1)
    ours = group_advantages(rewards, torch.ones(1), 4)
    grouped = rewards.view(-1, 4)
    other = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-3)).view(-1)
    assert (ours - other).abs().max() > 1e-5


def test_part_of_a_batch_has_other_advantages_under_batch_scaling():
    # why advantages are computed before anything is split
    rewards = batch(groups=6, generations=4)
    together = group_advantages(rewards, torch.ones(2), 4, "batch")[:12]
    assert (group_advantages(rewards[:12], torch.ones(2), 4, "batch") - together).abs().max() > 1e-3


# ---- Named estimators -----------------------------------------------------------------------------------------------

ONE = torch.ones(1)


def column(*rewards: float) -> torch.Tensor:
    return torch.tensor(rewards, dtype=torch.float64)[:, None]


def estimated(name: str, *rewards: float, group: int = 4) -> list[float]:
    return AdvantageRule(name).advantages(column(*rewards), ONE, group).tolist()


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


@pytest.fixture
def estimators() -> Iterator[dict[str, Any]]:
    """The registered estimators; those that a test adds are removed at its end."""
    before = dict(ESTIMATORS)
    yield ESTIMATORS
    ESTIMATORS.clear()
    ESTIMATORS.update(before)


def test_an_estimator_of_ones_own_takes_five_lines(estimators):
    @register_advantage_estimator("best_of_group")
    def best_of_group(rewards_PG):
        best = (rewards_PG == rewards_PG.amax(1, keepdim=True)).float()
        return best - best.mean(1, keepdim=True)

    assert estimated("best_of_group", 1, 2, 3, 0, 5, 5, 0, 0) == [-0.25, -0.25, 0.75, -0.25, 0.5, 0.5, -0.5, -0.5]
    with pytest.raises(ConfigError, match=r"'group_centered' comes with grpo_ext; choose another name"):
        register_advantage_estimator("group_centered")(torch.zeros_like)


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


def test_an_estimator_may_write_to_its_rewards_without_scoring_what_was_not(estimators):
    def filling(rewards):
        rewards[torch.isnan(rewards)] = 0
        return rewards - rewards.mean(1, keepdim=True)

    estimators["filling"] = filling
    assert estimated("filling", 1, NAN, 1, 1) == [0.25, 0.0, 0.25, 0.25]


def test_an_estimator_may_be_named_by_its_file(tmp_path, estimators):
    file = tmp_path / "mine.py"
    file.write_text("def halved(rewards):\n    return rewards / 2\n")
    assert estimated(f"{file}:halved", 1, 2, 3, 4) == [0.5, 1.0, 1.5, 2.0]
    with pytest.raises(ConfigError, match=r"defines no Callable other; it defines halved"):
        estimated(f"{file}:other", 1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"cannot be loaded .*No such file .*gone\.py"):
        estimated("gone.py:f", 1, 2, 3, 4)


def test_groups_without_variance():
    rewards = column(*(1, 1, 1, 1), *(0, 1, 1, 1), *(NAN,) * 4, *(NAN, 2, NAN, NAN), *(NAN, 2, 3, NAN))
    constant = AdvantageRule().constant_groups(rewards, ONE, 4)
    assert constant.tolist() == [True, False, True, True, False]


def test_rewards_that_cancel_have_no_variance_in_their_sum_but_apart():
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert AdvantageRule().constant_groups(rewards, torch.ones(2), 2).tolist() == [True]
    apart = AdvantageRule(aggregation="normalize_then_sum")
    assert apart.constant_groups(rewards, torch.ones(2), 2).tolist() == [False]
    # a function of weight zero teaches nothing
    assert apart.constant_groups(rewards, torch.tensor([0.0, 0.0]), 2).tolist() == [True]


# ---- Dynamic sampling -----------------------------------------------------------------------------------------------


def test_places_are_filled_in_order():
    places, free = fill_places([[True, False, False, True], [False, True], [True]])
    assert places == [(0, 0), (1, 1), (2, 0), (0, 3)]
    assert free == 0
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
    constant = [place for place, source in enumerate(places) if source not in useful]
    assert len(constant) == left
    assert all(places[place] == (0, place) for place in constant)
