"""Group-relative advantages, computed over whole groups before anything is split (GRPO, arXiv 2402.03300, eq. 3).

The default numbers are TRL's (`GRPOTrainer._generate_and_score_completions`); other estimators are chosen by name.
Shapes: B completions, F reward functions, P prompts (groups), G generations; groups contiguous.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError
from ..loading import require_registered
from .pass_at_k import are_pass_or_fail, pass_at_k, passes

THRESHOLD = "eval_pass_threshold"  # the setting, and a keyword of estimators
EPSILON = 1e-4  # TRL's guard against a zero standard deviation


def nan_mean(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The mean of entries that are not NaN; keeps dimensions. Of equal numbers it is that number, without rounding."""
    unknown, dims = torch.isnan(x), () if dim is None else (dim,)
    low = x.masked_fill(unknown, torch.inf).amin(dims, keepdim=True)
    high = x.masked_fill(unknown, -torch.inf).amax(dims, keepdim=True)
    return torch.where(low == high, low, torch.nanmean(x, dim=dim, keepdim=True))


def nan_std(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The deviation (Bessel's correction) of entries that are not NaN, or NaN for fewer than two; keeps dimensions."""
    count = (~torch.isnan(x)).sum(dim=dim, keepdim=True)
    centred = x - nan_mean(x, dim)
    variance = torch.nansum(centred**2, dim=dim, keepdim=True) / (count - 1)
    return torch.where(count > 1, variance, torch.nan).sqrt()


def _standardized(rewards: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    centred = rewards - nan_mean(rewards, dim)
    return centred / (nan_std(rewards, dim).nan_to_num() + EPSILON)


Estimator = Callable[..., torch.Tensor]
ESTIMATORS: dict[str, Estimator] = {}


def register_advantage_estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Register a function under a name, for `GRPOConfig(advantage_estimator=name)`.

    The function gets the rewards of the whole rollout batch, (P, G), one row per group, NaN where a completion was not
    scored, and returns advantages of the same shape; those of completions that were not scored count as zero. One with
    a keyword `lengths_PG` also gets the tokens of each completion that carry loss, (P, G); one with `advantage_k` the
    setting, and with `eval_pass_threshold` that one. A ConfigError if an estimator of this package has the name.
    """

    def register(estimator: Estimator) -> Estimator:
        if getattr(ESTIMATORS.get(name), "__module__", None) == __name__:
            raise ConfigError(f"advantage estimator {name!r} comes with grpo_ext; choose another name.")
        ESTIMATORS[name] = estimator  # a cell of a notebook may run again
        return estimator

    return register


@register_advantage_estimator("group_standardized")
def group_standardized(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean, over the group's standard deviation (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return _standardized(rewards_PG, dim=1)


@register_advantage_estimator("group_centered")
def group_centered(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return rewards_PG - nan_mean(rewards_PG, dim=1)


@register_advantage_estimator("leave_one_out")
def leave_one_out(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus the mean of the group's other rewards (RLOO, arXiv 2402.14740, section 3.3)."""
    scored = (~torch.isnan(rewards_PG)).sum(dim=1, keepdim=True)
    return group_centered(rewards_PG) * scored / (scored - 1).clamp(min=1)


@register_advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean, then standardised over the batch (REINFORCE++ with baseline, arXiv 2501.03262).

    Mean and standard deviation are over completions; OpenRLHF and verl weight each by its tokens.
    """
    return _standardized(group_centered(rewards_PG))


@register_advantage_estimator("max_rl")
def max_rl(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean, over that mean; zero where the mean is zero (MaxRL, arXiv 2602.02710).

    A ConfigError for a negative reward: the mean stands for the probability of success.
    """
    if (rewards_PG < 0).any():
        raise ConfigError(
            "advantage_estimator='max_rl' divides by the mean reward of a group, and a reward is "
            f"{float(rewards_PG.nan_to_num().min()):g}; return rewards of 0 or more, or use 'group_centered'."
        )
    rewards_PG = rewards_PG.double()
    mean_P1 = nan_mean(rewards_PG, dim=1)
    return torch.where(mean_P1 > 0, (rewards_PG - mean_P1) / mean_P1, 0.0)


@register_advantage_estimator("pass_at_k")
def group_pass_at_k(
    rewards_PG: torch.Tensor, advantage_k: int, eval_pass_threshold: float | None = None
) -> torch.Tensor:
    """Pass@k of the subsets of k that hold a completion, minus that of all subsets (arXiv 2508.10751).

    The numerators of the paper's advantages, which it divides by their deviation; for k=1 `group_centered`. Zero where
    fewer than k completions were scored. A ConfigError for rewards other than 0 and 1 without a threshold.
    """
    rows = rewards_PG.tolist()
    if eval_pass_threshold is None and not all(map(are_pass_or_fail, rows)):
        raise ConfigError(
            "advantage_estimator='pass_at_k' needs to know which rewards pass, and these are not all 0 or 1; set "
            "eval_pass_threshold, the least reward that passes."
        )
    least = 1.0 if eval_pass_threshold is None else eval_pass_threshold
    return rewards_PG.new_tensor([_pass_advantages(row, advantage_k, least) for row in rows])


def _pass_advantages(rewards_G: Sequence[float], k: int, threshold: float) -> list[float]:
    passed_G = [passes(reward, threshold) for reward in rewards_G]
    scored, count = sum(not math.isnan(reward) for reward in rewards_G), sum(passed_G)
    if scored < k:
        return [0.0] * len(passed_G)
    mean = pass_at_k(scored, count, k)
    with_a_failure = pass_at_k(scored - 1, count, k - 1) if count < scored else 1.0
    return [(1.0 if passed else with_a_failure) - mean for passed in passed_G]


@register_advantage_estimator("optimal_baseline")
def optimal_baseline(rewards_PG: torch.Tensor, lengths_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean reward weighted by length (OPO, arXiv 2505.23585).

    Zero for a group without a token that carries loss. In float64 equal rewards give exactly zero.
    """
    weights_PG = torch.where(torch.isnan(rewards_PG), 0.0, lengths_PG.double())
    total_P1 = weights_PG.sum(dim=1, keepdim=True)
    baseline_P1 = (weights_PG * rewards_PG.double().nan_to_num()).sum(dim=1, keepdim=True) / total_P1.clamp(min=1)
    return torch.where(total_P1 > 0, rewards_PG - baseline_P1, 0.0)


def takes_keyword(estimator: str, keyword: str) -> bool:
    check_estimator(estimator)
    try:
        return keyword in inspect.signature(ESTIMATORS[estimator]).parameters
    except ValueError:  # a function of C, such as torch.sign
        return False


def check_estimator(name: str) -> None:
    """Raise a ConfigError for an estimator that neither a registration nor a file has."""
    require_registered(name, "advantage_estimator", register_advantage_estimator, lambda: sorted(ESTIMATORS))


@dataclass(frozen=True)
class AdvantageRule:
    """How rewards (B, F) of a whole rollout batch become advantages; NaN: a function returned None."""

    weights_F: torch.Tensor  # of the functions, on the CPU
    num_generations: int
    estimator: str | None = None  # `advantage_estimator`; None: the two settings below
    scale_rewards: str = "group"  # or "batch" or "none": the standard deviation that divides the centred reward
    # TRL's `multi_objective_aggregation`; or "normalize_then_sum" (GDPO, arXiv 2601.05242)
    aggregation: str = "sum_then_normalize"
    k: int | None = None  # `advantage_k`
    pass_threshold: float | None = None  # `eval_pass_threshold`

    def advantages(self, rewards_BF: torch.Tensor, masks: Iterable[torch.Tensor]) -> torch.Tensor:
        """(B,); zero for completions that no function scored. Masks: 1 on the tokens that carry loss."""
        rewards_PG = self._combined(rewards_BF)
        if self.estimator is not None:
            return _estimated(self, self.estimator, rewards_PG, masks)
        scaled = _standardized if self.aggregation == "normalize_then_sum" else _SCALED[self.scale_rewards]
        return scaled(rewards_PG).view(-1).nan_to_num(nan=0.0)

    def zero_std_fraction(self, rewards_BF: torch.Tensor) -> float:
        """The share of groups whose rewards are all equal, as TRL logs it (`frac_reward_zero_std`)."""
        rewards_PG = self._combined(rewards_BF)
        if self.scale_rewards == "batch" or self.aggregation == "normalize_then_sum":
            rewards_PG = rewards_PG.view(1, -1)
        std = nan_std(rewards_PG, dim=1) if rewards_PG.size(1) > 1 else torch.zeros(len(rewards_PG))
        return torch.isclose(std, torch.zeros_like(std)).float().mean().item()

    def _combined(self, rewards_BF: torch.Tensor) -> torch.Tensor:
        """(P, G); "normalize_then_sum" standardises each function's rewards in the group first."""
        rewards_B = weighted_sum(rewards_BF, self.weights_F)
        if self.aggregation == "normalize_then_sum":
            grouped = rewards_BF.view(-1, self.num_generations, rewards_BF.size(1))
            total_B = weighted_sum(_standardized(grouped, dim=1).view_as(rewards_BF), self.weights_F)
            rewards_B = torch.where(torch.isnan(rewards_B), torch.nan, total_B.nan_to_num(nan=0.0))
        return rewards_B.view(-1, self.num_generations)

    def constant_groups(self, rewards_BF: torch.Tensor) -> torch.Tensor:
        """The groups with equal rewards, in GDPO of each function: they teach nothing, (P,) (DAPO, 2503.14476).

        With "pass_at_k" a group with fewer than k failures teaches nothing either: every subset of k has a pass.
        """
        if self.estimator == "pass_at_k":
            advantages_B = self.advantages(rewards_BF, masks=())
            return (advantages_B.view(-1, self.num_generations) == 0).all(dim=1)
        values = rewards_BF[:, self.weights_F.to(rewards_BF) != 0]
        if self.aggregation == "sum_then_normalize":
            values = weighted_sum(rewards_BF, self.weights_F)[:, None]
        grouped = values.reshape(len(values) // self.num_generations, self.num_generations, values.size(1))
        low = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
        high = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
        return (high <= low).all(dim=1)

    @property
    def depends_on_the_batch(self) -> bool:
        """Whether the advantages of a group may depend on other groups."""
        if self.estimator is not None:
            by_group = ("group_standardized", "group_centered", "leave_one_out", "max_rl", "pass_at_k")
            return self.estimator not in (*by_group, "optimal_baseline")
        return self.scale_rewards == "batch" or self.aggregation == "normalize_then_sum"


def _estimated(rule: AdvantageRule, name: str, rewards_PG: torch.Tensor, masks: Iterable[torch.Tensor]) -> torch.Tensor:
    settings = {"advantage_k": rule.k, THRESHOLD: rule.pass_threshold}
    keywords: dict[str, Any] = {n: value for n, value in settings.items() if takes_keyword(name, n)}
    if takes_keyword(name, "lengths_PG"):
        keywords["lengths_PG"] = rewards_PG.new_tensor([int(mask.sum()) for mask in masks]).view_as(rewards_PG)
    expected, count = tuple(rewards_PG.shape), rewards_PG.numel()
    advantages = ESTIMATORS[name](rewards_PG.clone(), **keywords)  # a copy: an estimator may write to its argument
    if not isinstance(advantages, torch.Tensor) or tuple(advantages.shape) not in (expected, (count,)):
        shape = tuple(advantages.shape) if isinstance(advantages, torch.Tensor) else type(advantages).__name__
        raise ConfigError(
            f"advantage estimator {name!r} returned {shape} for rewards of shape {expected}; it must return one number "
            "per completion, in that shape."
        )
    advantages = advantages.reshape(expected).to(rewards_PG)
    broken = (~torch.isfinite(advantages) & ~torch.isnan(rewards_PG)).nonzero().tolist()
    if broken:
        group, row = broken[0]
        raise ConfigError(
            f"advantage estimator {name!r} returned {float(advantages[group, row])} for completion {row} of group "
            f"{group}, whose reward is {float(rewards_PG[group, row]):g}; it must return finite numbers."
        )
    return torch.where(torch.isnan(rewards_PG), 0.0, advantages).reshape(-1)


def _batch_scaled(rewards_PG: torch.Tensor) -> torch.Tensor:
    return group_centered(rewards_PG) / (nan_std(rewards_PG).nan_to_num() + EPSILON)


# by TRL's `scale_rewards`
_SCALED: dict[Any, Estimator] = {"group": group_standardized, "none": group_centered, "batch": _batch_scaled}
_SCALED |= {True: group_standardized, False: group_centered}


def weighted_sum(rewards_BF: torch.Tensor, weights_F: torch.Tensor) -> torch.Tensor:
    """The sum over the functions that scored a completion, (B,); NaN where none did."""
    total = (rewards_BF * weights_F.to(rewards_BF)).nansum(dim=1)
    return torch.where(torch.isnan(rewards_BF).all(dim=1), torch.nan, total)


def fill_places(teaches: Sequence[Sequence[bool]]) -> tuple[list[tuple[int, int]], int]:
    """Round and group of each place of the rollout batch, and the number of places that keep a group without variance.

    Differs from DAPO's reference code: the batch keeps its size, a round samples as many prompts as there are open
    places, so no group with variance is thrown away. `teaches`: whether each group of each round has variance.
    """
    places = [(0, group) for group in range(len(teaches[0]))]
    free = [place for place, useful in enumerate(teaches[0]) if not useful]
    for number, groups in enumerate(teaches[1:], start=1):
        for group, useful in enumerate(groups):
            if useful:
                places[free.pop(0)] = (number, group)
    return places, len(free)
