"""Dynamic sampling: groups of further prompts replace groups without variance, and all rounds become one rollout batch.

The order of places and of further prompts depends on rewards and the data alone, never on the split. Called by
`Rollouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..algorithms.advantages import fill_places
from ..batching.prompt_order import StepRows
from .batch import RolloutBatch
from .join import Round
from .local import RewardSettings


@dataclass
class RoundsOfBatch:
    """The rounds of a rollout batch, and which of their groups fill its places."""

    rewards: RewardSettings
    num_generations: int
    rounds: list[Round] = field(default_factory=list)
    _has_variance: list[list[bool]] = field(default_factory=list)  # of each group, by round
    _places: list[tuple[int, int]] = field(default_factory=list)  # round and group of each place
    open_places: int = 0  # places whose group has no variance

    @property
    def further_prompts(self) -> int:
        """Prompts of the rounds after the first."""
        return sum(map(len, self._has_variance[1:]))

    def add(self, part: Round) -> None:
        """Add a round, and choose groups anew."""
        self.rounds.append(part)
        rule, weights_F = self.rewards.rule, self.rewards.weights_F
        constant = rule.constant_groups(part.rewards_BF, weights_F, self.num_generations)
        self._has_variance.append([not value for value in constant.tolist()])
        self._places, self.open_places = fill_places(self._has_variance)

    def metrics(self) -> dict[str, int]:
        """What is logged under `dynamic_sampling/`."""
        return {
            "rounds": len(self.rounds) - 1,
            "sampled_groups": sum(map(len, self.rounds)) // self.num_generations,
            "replaced_groups": len({place for place in self._places if place[0]}),
            "groups_without_variance": self.open_places,
        }

    def joined(self) -> tuple[RolloutBatch, torch.Tensor]:
        """The rollout batch, and the rewards (B, F) of its completions."""
        rounds, group = self.rounds, self.num_generations
        starts = [sum(map(len, rounds[:number])) for number in range(len(rounds))]
        chosen = [starts[number] + place * group + i for number, place in self._places for i in range(group)]
        rewards_BF = torch.cat([part.rewards_BF for part in rounds])[chosen]
        batch = RolloutBatch.joined([part.batch for part in rounds], group).select(chosen)
        batch.groups = rounds[0].batch.groups
        rule = self.rewards.rule
        if len(rounds) > 1 and rule.depends_on_the_batch:
            batch.columns["advantages"] = rule.advantages(rewards_BF, self.rewards.weights_F, group)
        return batch, rewards_BF


def sample_rounds(
    rows: StepRows,
    rewards: RewardSettings,
    make_round: Callable[[StepRows], Round],
    further_rows: Callable[[int, int], StepRows | None],
    max_rounds: int,
) -> RoundsOfBatch:
    """Sample rows, then further prompts while places are open; a collective.

    Args:
        further_rows: returns this process's rows of further prompts, given how many were taken and how many are
            wanted; None where none is left.
        max_rounds: of further prompts.
    """
    sampled = RoundsOfBatch(rewards, rows.request.num_generations)
    next_rows: StepRows | None = rows
    while next_rows is not None and len(sampled.rounds) <= max_rounds:
        sampled.add(make_round(next_rows))
        open_places = sampled.open_places
        next_rows = further_rows(sampled.further_prompts, open_places) if open_places else None
    return sampled
