"""Objectives by enumeration: what a setting says it follows, and what explains it where it follows something else.

Each returns one number whose gradient is taken; `detach` marks what an estimator holds fixed. Shapes as in policy.py.
"""

import itertools
import math
from collections.abc import Callable

import torch

from .policy import ENDED_N, LENGTHS_N, LONGEST, REWARDS_PN, Distribution, Objective

GENERATIONS = 8
# coefficients of the completions of groups, from their rewards (C, G) and lengths (C, G)
Coefficient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def pass_rates(policy: Distribution) -> torch.Tensor:
    """The probability of a reward of 1, (P,)."""
    return policy.mean(REWARDS_PN)


def expected_reward(policy: Distribution) -> torch.Tensor:
    return pass_rates(policy).mean()


def over_deviation(policy: Distribution) -> torch.Tensor:
    """Its gradient is that of the expected reward, each prompt over the deviation of its rewards (GRPO, many samples).

    The integral of 1 / sqrt(p (1 - p)) is 2 arcsin(sqrt(p)).
    """
    return 2 * pass_rates(policy).sqrt().arcsin().mean()


def pass_at(k: int) -> Objective:
    """The probability that one of k completions has a reward of 1 (arXiv 2107.03374)."""
    return lambda policy: (1 - (1 - pass_rates(policy)) ** k).mean()


def truncated_likelihood(order: int) -> Objective:
    """The log-likelihood of a reward of 1, as a series of pass@k / k cut after `order` terms (MaxRL, 2602.02710)."""

    def objective(policy: Distribution) -> torch.Tensor:
        return sum(pass_at(k)(policy) / k for k in range(1, order + 1))

    return objective


def per_token(policy: Distribution) -> torch.Tensor:
    """The expected reward per token of the answer, above the prompt's mean reward, which is held fixed."""
    above_PN = REWARDS_PN - pass_rates(policy).detach()[:, None]
    return policy.mean(above_PN / LENGTHS_N).mean()


def over_mean_length(policy: Distribution) -> torch.Tensor:
    """The expected reward, each prompt over the mean length of its answers, which is held fixed."""
    lengths_P = policy.mean(LENGTHS_N.double().expand_as(REWARDS_PN)).detach()
    return (pass_rates(policy) / lengths_P).mean()


def ended_only(policy: Distribution) -> torch.Tensor:
    """The expected reward where an answer that is cut off scores the prompt's mean reward, which is held fixed."""
    above_PN = REWARDS_PN - pass_rates(policy).detach()[:, None]
    return policy.mean(above_PN * ENDED_N).mean()


def expected_length(policy: Distribution) -> torch.Tensor:
    return policy.mean(LENGTHS_N.double().expand_as(REWARDS_PN)).mean()


def plus(first: Objective, factor: float, second: Objective) -> Objective:
    return lambda policy: first(policy) + factor * second(policy)


def reverse_kl(policy: Distribution) -> torch.Tensor:
    """KL(policy || reference) of whole completions."""
    return policy.mean(policy.logps_PN - policy.reference_PNT.sum(-1)).mean()


def _over_prefixes(policy: Distribution, terms_PNT: torch.Tensor) -> torch.Tensor:
    return (policy.logps_PN.detach().exp()[..., None] * terms_PNT).sum((1, 2)).mean()


def token_reverse_kl(policy: Distribution) -> torch.Tensor:
    """The sum of KL(policy || reference) of the tokens, with the prefixes' probabilities held fixed."""
    apart_PNT = (policy.logps_PNT - policy.reference_PNT).detach()
    return _over_prefixes(policy, apart_PNT * policy.logps_PNT)


def token_forward_kl(policy: Distribution) -> torch.Tensor:
    """The sum of KL(reference || policy) of the tokens, with the prefixes' probabilities held fixed."""
    ratio_PNT = (policy.reference_PNT - policy.logps_PNT).detach().exp()
    return _over_prefixes(policy, -ratio_PNT * policy.logps_PNT)


def of_groups(coefficient: Coefficient) -> Objective:
    """The exact mean of a sum of coefficients times gradients of log-probabilities, over all groups of 8 completions.

    A completion's coefficient depends on its reward and length, and on how many of the other seven have which: all
    such compositions are enumerated with their multinomial probabilities.
    """
    kinds = list(itertools.product((0.0, 1.0), range(1, LONGEST + 1)))
    others = list(itertools.combinations_with_replacement(range(len(kinds)), GENERATIONS - 1))
    counts_CK = torch.stack([torch.bincount(torch.tensor(c), minlength=len(kinds)) for c in others]).double()
    ways_C = torch.tensor([math.factorial(GENERATIONS - 1)]) / (counts_CK + 1).lgamma().exp().prod(1)

    def objective(policy: Distribution) -> torch.Tensor:
        with torch.no_grad():
            kinds_KPN = torch.stack([(REWARDS_PN == r) & (LENGTHS_N == n) for r, n in kinds])
            shares_PK = torch.stack([policy.mean(kind_PN.double()) for kind_PN in kinds_KPN], dim=1)
            chances_PC = ways_C * (shares_PK[:, None] ** counts_CK).prod(-1)
            expected_PN = torch.zeros_like(REWARDS_PN)
            for own, kind_PN in enumerate(kinds_KPN):
                group_CG = torch.tensor([[kinds[k] for k in (own, *composition)] for composition in others]).double()
                own_C = coefficient(group_CG[..., 0], group_CG[..., 1])[:, 0]
                expected_PN += kind_PN * (chances_PC * own_C).sum(1, keepdim=True)
        return (policy.logps_PN.detach().exp() * expected_PN * policy.logps_PN).sum(1).mean()

    return objective
