"""The rollout batch that dynamic sampling makes of several rounds, on every process alike.

Differs from TRL, which trains on groups without variance as they are. algorithms.dynamic_sampling decides which group
takes which place; here completions, rewards and log values of the rounds are put together. Used by sampler.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..algorithms.advantages import nan_std, weighted_sum
from ..algorithms.dynamic_sampling import Source, combine_metrics
from ..algorithms.exact import exact_mean
from ..batching.sizes import group_numbers
from ..rollouts.batch import RolloutBatch


@dataclass(frozen=True)
class Round:
    """One round of a rollout batch, in global order, the same on every process.

    Attributes:
        rollout: its completions.
        rewards_BF: their rewards.
        metrics: what TRL logged of it.
        logged: what its reward functions logged, every value.
    """

    rollout: RolloutBatch
    rewards_BF: torch.Tensor
    metrics: dict[str, float]
    logged: dict[str, list[float]] = field(default_factory=dict)


def assemble(
    rounds: Sequence[Round], places: Sequence[Source], num_generations: int
) -> tuple[RolloutBatch, torch.Tensor]:
    """The completions and rewards of the groups that take the places, in the order of the places."""
    firsts = [0, *itertools.accumulate(len(part.rollout) for part in rounds)]
    rows = [
        firsts[number] + row
        for number, group in places
        for row in range(group * num_generations, (group + 1) * num_generations)
    ]
    rollout = RolloutBatch.joined([part.rollout for part in rounds], num_generations).select(rows)
    rollout.groups = group_numbers(len(rows), num_generations)
    return rollout, torch.cat([part.rewards_BF for part in rounds])[rows]


def log_values(
    rounds: Sequence[Round],
    places: Sequence[Source],
    free: int,
    weights_F: torch.Tensor,
    reward_names: Sequence[str],
    num_generations: int,
) -> dict[str, float]:
    """The log values of the rollout batch: of everything that was sampled, and how many groups were replaced.

    Args:
        places, free: which group takes each place, and how many still have one without variance.
        reward_names: names of the reward functions, as TRL logs them.
    """
    values = combine_metrics([part.metrics for part in rounds], [len(part.rollout) for part in rounds])
    rewards_BF = torch.cat([part.rewards_BF for part in rounds])
    for name, rewards in zip(reward_names, rewards_BF.unbind(1)):
        values[f"rewards/{name}/mean"] = rewards.nanmean().item()
        values[f"rewards/{name}/std"] = nan_std(rewards).item()
    for name in sorted({name for part in rounds for name in part.logged}):
        values[name] = exact_mean([value for part in rounds for value in part.logged.get(name, ())])
    total = weighted_sum(rewards_BF, weights_F)
    values["reward"], values["reward_std"] = total.nanmean().item(), nan_std(total).item()
    later = {source for source in places if source[0]}
    groups = sum(len(part.rollout) for part in rounds) // num_generations
    return values | {
        "dynamic_sampling/rounds": len(rounds) - 1,
        "dynamic_sampling/sampled_groups": groups,
        "dynamic_sampling/replaced_groups": len(later),
        "dynamic_sampling/groups_without_variance": free,
    }
