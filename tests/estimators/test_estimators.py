"""A setting's mean gradient beside the exact gradient of an objective: the check finds what is planted, no more.

The whole table is a command: `python -m tests.estimators`.
"""

import functools

import pytest
import torch

from grpo_ext.algorithms.advantages import group_centered, leave_one_out
from tests.estimators import objectives as of
from tests.estimators.measure import ROLLOUT, compare
from tests.estimators.policy import REWARDS_PN, Distribution, flat_parameters, gradient, log_probs
from tests.estimators.rows import PLANTED, ROWS, measured

CENTRED = 7 / 8  # of `group_centered`: the mean of 8 holds a completion's own reward
ROUNDING = 1e-6  # RMSNorm computes in float32
START = flat_parameters()


@pytest.fixture
def completions(request) -> int:
    """A rollout of each prompt, and with --full another one."""
    return ROLLOUT * (1 + request.config.getoption("--full"))


@functools.cache
def exact(objective: of.Objective) -> torch.Tensor:
    return gradient(objective, START, START)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def noisy(mean_D: torch.Tensor, blocks: int = 64) -> torch.Tensor:
    """Gradients of blocks around a mean, with noise of unequal sizes, (M, D)."""
    source = torch.Generator().manual_seed(0)
    sizes_D = torch.linspace(0.01, 1, len(mean_D)).double() * mean_D.norm() / len(mean_D) ** 0.5
    return mean_D + sizes_D * torch.randn(blocks, len(mean_D), generator=source, dtype=torch.float64)


@pytest.mark.full
def test_the_base_row_follows_the_expected_reward(completions):
    ((found, _),) = measured(ROWS[0], completions)
    assert not found.biased, found
    assert abs(found.factor - CENTRED) < 4 * found.factor_error, found


@pytest.mark.parametrize("row", [PLANTED[0], *(pytest.param(row, marks=pytest.mark.full) for row in PLANTED[1:])])
def test_a_planted_bias_is_found(row, completions):
    found, _ = measured(row, completions)[0]
    assert found.biased, found


def test_all_completions_of_a_prompt_have_a_probability_of_one():
    for filters in ({}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.8}):
        policy = Distribution(log_probs(START, **filters), log_probs(START))
        torch.testing.assert_close(policy.mean(torch.ones_like(REWARDS_PN)), torch.ones(4).double())


@pytest.mark.full
def test_group_estimators_have_the_factors_that_algebra_gives():
    reward = exact(of.expected_reward)
    for estimator, factor in ((group_centered, CENTRED), (leave_one_out, 1.0)):
        found = exact(of.of_groups(lambda rewards, lengths, of_rewards=estimator: of_rewards(rewards)))
        assert apart(found, factor * reward) < ROUNDING
    above = of.of_groups(lambda rewards, lengths: rewards - (rewards * lengths).sum(1, True) / lengths.sum(1, True))
    fitted = exact(above) @ reward / (reward @ reward) * reward
    assert apart(exact(above), fitted) > 0.01  # a length-weighted baseline holds a completion's own reward and length


@pytest.mark.full
def test_objectives_meet_where_they_are_the_same():
    reward = exact(of.expected_reward)
    assert apart(exact(of.pass_at(1)), reward) < ROUNDING
    assert (
        apart(exact(of.truncated_likelihood(4000)), exact(lambda policy: of.pass_rates(policy).log().mean())) < ROUNDING
    )
    assert apart(exact(of.surrogate(lambda ratio, logps, positive: ratio)), reward) < ROUNDING
    for term in (of.clipped(0.8, 1.2), lambda ratio, logps, positive: of.mean_ratio(ratio), of.vespo_term):
        assert apart(exact(of.surrogate(term)), reward) < ROUNDING  # where the policy is the old one


def test_what_is_left_of_a_mean_gradient_is_measured_without_its_noise():
    reward, length = exact(of.expected_reward), exact(of.expected_length)
    across = length - length @ reward / (reward @ reward) * reward
    shifted = 2 * reward + 0.4 * reward.norm() * across / across.norm()
    plain, planted = (compare(noisy(mean), reward, length) for mean in (2 * reward, shifted))
    assert not plain.biased
    assert planted.biased
    assert planted.norm > 4 < planted.projection
    for found in (plain, planted):
        assert abs(found.factor - 2) < 4 * found.factor_error
    assert planted.left == pytest.approx(0.2, rel=0.1)
    assert plain.smallest < 0.2


def test_the_norm_of_pure_noise_is_a_normal_deviate():
    reward, length = exact(of.expected_reward), exact(of.expected_length)
    blocks = noisy(0.1 * reward, 64 * 100).view(100, 64, -1)
    norms = torch.tensor([compare(each, reward, length).norm for each in blocks])
    assert abs(float(norms.mean())) < 0.4
    assert float(norms.std()) == pytest.approx(1, abs=0.2)
