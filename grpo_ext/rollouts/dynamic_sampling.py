"""Dynamic sampling: groups of further prompts replace groups without variance, and all rounds become one rollout batch.

Which group takes which place depends on rewards and the data alone, never on the split. Called by `Rollouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..algorithms.advantages import fill_places
from ..batching.prompt_order import StepRows
from .batch import RolloutBatch
from .join import Round
from .local import RewardSettings


@dataclass(frozen=True)
class FilledBatch:
    """A rollout batch whose groups without variance were replaced.

    Attributes:
        rounds: all that was sampled for it.
        rewards_BF: of its completions.
        metrics: log values, under `dynamic_sampling/`.
    """

    rounds: list[Round]
    batch: RolloutBatch
    rewards_BF: torch.Tensor
    metrics: dict[str, int]


def fill_batch(
    rows: StepRows,
    rewards: RewardSettings,
    make_round: Callable[[StepRows], Round],
    further_rows: Callable[[int, int], StepRows | None],
    max_rounds: int,
) -> FilledBatch:
    """Sample rows, then further prompts for the places of groups without variance; a collective.

    Args:
        further_rows: returns this process's rows of further prompts, given how many were taken and how many are
            wanted; None where none is left.
        max_rounds: of further prompts.
    """
    rule, weights_F, group = rewards.rule, rewards.weights_F, rows.request.num_generations
    rounds: list[Round] = []
    has_variance: list[list[bool]] = []  # of each group, by round
    next_rows: StepRows | None = rows
    while next_rows is not None and len(rounds) <= max_rounds:
        rounds.append(make_round(next_rows))
        constant = rule.constant_groups(rounds[-1].rewards_BF, weights_F, group)
        has_variance.append([not value for value in constant.tolist()])
        places, open_places = fill_places(has_variance)
        next_rows = further_rows(sum(map(len, has_variance[1:])), open_places) if open_places else None
    metrics = {
        "rounds": len(rounds) - 1,
        "sampled_groups": sum(map(len, has_variance)),
        "replaced_groups": len({place for place in places if place[0]}),
        "groups_without_variance": open_places,
    }
    starts = [sum(map(len, rounds[:number])) for number in range(len(rounds))]
    chosen = [starts[number] + place * group + i for number, place in places for i in range(group)]
    rewards_BF = torch.cat([part.rewards_BF for part in rounds])[chosen]
    batch = RolloutBatch.joined([part.batch for part in rounds], group).select(chosen)
    batch.groups = rounds[0].batch.groups
    if len(rounds) > 1 and rule.depends_on_the_batch:
        batch.columns["advantages"] = rule.advantages(rewards_BF, weights_F, group)
    return FilledBatch(rounds, batch, rewards_BF, metrics)
