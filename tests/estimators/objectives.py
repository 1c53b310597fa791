"""Objectives by enumeration: what a setting says it follows, and what explains it where it follows something else.

Each returns one number whose gradient is taken; `detach` marks what an estimator holds fixed. Shapes as in policy.py.
"""

import itertools
import math
from collections.abc import Callable

import torch

from .policy import ENDED_N, LENGTHS_N, LONGEST, MASK_NT, REWARDS_PN, Distribution, Objective

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

    orders_K = torch.arange(1, order + 1)
    return lambda policy: ((1 - (1 - pass_rates(policy)[:, None]) ** orders_K) / orders_K).sum(1).mean()


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


def token_entropy(policy: Distribution) -> torch.Tensor:
    """The entropy of the tokens, with the prefixes' probabilities held fixed, over the mean length."""
    lengths = policy.mean(LENGTHS_N.double().expand_as(REWARDS_PN)).detach().mean()
    return _over_prefixes(policy, -policy.logps_PNT.detach() * policy.logps_PNT) / lengths


# the loss of a token, up to its advantage, from its ratio to the old policy (P, N, T) and log-probabilities; and
# whether the advantage is positive (P, N, 1)
TokenTerm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def surrogate(term: TokenTerm) -> Objective:
    """The mean over completions of the old policy (here the reference) of their advantages times terms of their tokens.

    With rewards of 0 and 1 the sign of an advantage is known from the reward alone.
    """

    def objective(policy: Distribution) -> torch.Tensor:
        old_PN = policy.reference_PNT.sum(-1).exp()
        above_PN = REWARDS_PN - (old_PN * REWARDS_PN).sum(1, keepdim=True)
        ratio_PNT = (policy.logps_PNT - policy.reference_PNT).exp()
        terms_PNT = term(ratio_PNT, policy.logps_PNT, REWARDS_PN[..., None] > 0)
        return (old_PN * above_PN * (terms_PNT * MASK_NT).sum(-1)).sum(1).mean()

    return objective


def clipped(low: float, high: float) -> TokenTerm:
    """The ratio, clipped from above for positive advantages and from below for negative ones (PPO, 1707.06347)."""
    return lambda ratio, logps, positive: torch.where(positive, ratio.clamp(max=high), ratio.clamp(min=low))


def distance(policy: Distribution) -> tuple[float, float]:
    """KL(old policy || policy) in nats per token, and the share of tokens clipped at 0.8 and 1.2, on old samples."""
    weights_PNT = policy.reference_PNT.sum(-1, keepdim=True).exp() * MASK_NT
    ratio_PNT, positive_PN1 = (policy.logps_PNT - policy.reference_PNT).exp(), REWARDS_PN[..., None] > 0
    outside_PNT = torch.where(positive_PN1, ratio_PNT > 1.2, ratio_PNT < 0.8)
    means = [(weights_PNT * values).sum() / weights_PNT.sum() for values in (-ratio_PNT.log(), outside_PNT)]
    return float(means[0]), float(means[1])


def mean_ratio(ratio_PNT: torch.Tensor) -> torch.Tensor:
    """The geometric mean of a completion's ratios, for each of its tokens (GSPO, 2507.18071)."""
    return ((ratio_PNT.log() * MASK_NT).sum(-1, keepdim=True) / LENGTHS_N[:, None]).exp().expand_as(ratio_PNT)


def whole_ratio(ratio_PNT: torch.Tensor) -> torch.Tensor:
    """The ratio of the whole completion, (P, N, 1), held fixed."""
    return (ratio_PNT.detach().log() * MASK_NT).sum(-1, keepdim=True).exp()


def vespo_term(ratio_PNT: torch.Tensor, logps_PNT: torch.Tensor, positive_PN1: torch.Tensor) -> torch.Tensor:
    """VESPO's weight of a completion's ratio, with TRL's default constants, times the log-probabilities."""
    ratio_PN1 = whole_ratio(ratio_PNT)
    k, rate = torch.where(positive_PN1, 2.0, 3.0), torch.where(positive_PN1, 3.0, 2.0)
    return (rate + k * ratio_PN1.log() - rate * ratio_PN1).exp() * logps_PNT


def sapo_term(ratio_PNT: torch.Tensor, logps_PNT: torch.Tensor, positive_PN1: torch.Tensor) -> torch.Tensor:
    """SAPO's gate with TRL's default temperatures (arXiv 2511.20347)."""
    temperature = torch.where(positive_PN1, 1.0, 1.05)
    return torch.sigmoid(temperature * (ratio_PNT - 1)) * 4 / temperature


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
            kinds_KPN = torch.stack([(r == REWARDS_PN) & (n == LENGTHS_N) for r, n in kinds])
            shares_PK = torch.stack([policy.mean(kind_PN.double()) for kind_PN in kinds_KPN], dim=1)
            chances_PC = ways_C * (shares_PK[:, None] ** counts_CK).prod(-1)
            expected_PN = torch.zeros_like(REWARDS_PN)
            for own, kind_PN in enumerate(kinds_KPN):
                group_CG = torch.tensor([[kinds[k] for k in (own, *composition)] for composition in others]).double()
                own_C = coefficient(group_CG[..., 0], group_CG[..., 1])[:, 0]
                expected_PN += kind_PN * (chances_PC * own_C).sum(1, keepdim=True)
        return (policy.logps_PN.detach().exp() * expected_PN * policy.logps_PN).sum(1).mean()

    return objective
