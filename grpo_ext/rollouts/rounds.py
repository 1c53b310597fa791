"""Rollout batches that are not one plain round: what a user's override returns, and what dynamic sampling adds.

Dynamic sampling: groups of further prompts replace groups without variance; which group takes which place depends only
on rewards and the data, never on the split. Called by `Rollouts`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..algorithms.advantages import fill_places
from ..batching.prompt_order import StepDataset, StepRows
from ..config import GRPOConfig
from ..errors import ConfigError, RolloutError, counted
from ..forward.columns import ADVANTAGES, ROW_IMAGES, TrlBatch
from ..runtime.messages import logger
from ..sampling.equal_shares import refuse_unequal_shares
from .batch import RolloutBatch
from .from_trl import gather_scored
from .images import ImageSource
from .join import Round
from .local import RolloutSettings


@dataclass(frozen=True)
class ScoredBatch:
    """A rollout batch, with what it was made of."""

    batch: RolloutBatch
    rewards_BF: torch.Tensor | None  # of its completions; None where a user's override made them
    settings: RolloutSettings
    rounds: list[Round]  # all that was sampled for it
    chosen: list[int] | None = None  # which completions of the rounds, one after the other, it has; None: all
    metrics: Mapping[str, float] = field(default_factory=dict)  # log values of dynamic sampling


def fill_groups(
    rows: StepRows,
    settings: RolloutSettings,
    steps: StepDataset,
    max_rounds: int,
    make_round: Callable[[StepRows], Round],
) -> ScoredBatch:
    """Sample rows, then further prompts for the places of groups without variance; a collective."""
    rule, group = settings.rule, settings.num_generations
    rounds: list[Round] = []
    has_variance: list[list[bool]] = []  # of each group, by round
    next_rows: StepRows | None = rows
    while next_rows is not None and len(rounds) <= max_rounds:
        rounds.append(make_round(next_rows))
        constant = rule.constant_groups(rounds[-1].rewards_BF)
        has_variance.append([not value for value in constant.tolist()])
        places, open_places = fill_places(has_variance)
        next_rows = None
        if open_places:
            next_rows = steps.further_rows(rows.request, sum(map(len, has_variance[1:])), open_places)
    metrics = {
        "dynamic_sampling/rounds": len(rounds) - 1,
        "dynamic_sampling/sampled_groups": sum(map(len, has_variance)),
        "dynamic_sampling/replaced_groups": len({place for place in places if place[0]}),
        "dynamic_sampling/groups_without_variance": open_places,
    }
    starts = [sum(map(len, rounds[:number])) for number in range(len(rounds))]
    chosen = [starts[number] + place * group + i for number, place in places for i in range(group)]
    rewards_BF = torch.cat([part.rewards_BF for part in rounds])[chosen]
    batch = RolloutBatch.joined([part.batch for part in rounds], group).select(chosen)
    batch = replace(batch, groups=rounds[0].batch.groups)
    if len(rounds) > 1 and rule.depends_on_the_batch:
        batch = batch.having(ADVANTAGES, rule.advantages(rewards_BF, batch.loss_masks))
    return ScoredBatch(batch, rewards_BF, settings, rounds, chosen, metrics)


def round_by_user(
    scored: TrlBatch,
    rows: StepRows,
    made: Sequence[Round],
    settings: RolloutSettings,
    args: GRPOConfig,
    images: ImageSource,
) -> Round:
    """The round that a user's `_generate_and_score_completions` returned; a collective.

    `scored` is TRL's dictionary of this process, `made` what TRL's method made for the override.
    """
    request = rows.request
    batch = gather_scored(scored, 0 if request.stands_in else len(rows), request.num_generations)
    scored_once = len(made) == 1 and len(made[0]) == len(batch)
    if args.dynamic_sampling and settings.training and not scored_once:
        raise RolloutError(
            f"_generate_and_score_completions returned {len(batch)} completions and called TRL's method "
            f"{counted(len(made), 'time')}, for {sum(map(len, made))}; dynamic_sampling=True needs the "
            "rewards of what it returns. Call super() once, for the rows that are returned, or set it to False."
        )
    if not made:  # it did not call TRL's method
        _check_scoring_without_super(rows, args.bitwise_invariant)
        unknown_BF = torch.full((len(batch), len(settings.functions.names)), torch.nan)
        zeros_B = torch.zeros(len(batch))
        return Round(request, batch, unknown_BF, zeros_B, entries=[], reward_calls=[], local_rows=range(0))
    last = made[-1]
    if images.prepare is not None:
        _check_same_rows(last, batch)
        batch = batch.having(ROW_IMAGES, last.batch[ROW_IMAGES])
    return replace(last, batch=batch)


def _check_same_rows(last: Round, batch: RolloutBatch) -> None:
    same = len(last) == len(batch)
    if not (same and all(torch.equal(*pair) for pair in zip(last.batch.prompts, batch.prompts, strict=True))):
        raise RolloutError(
            "_generate_and_score_completions returned other rows of a model that takes images, or in another "
            "order, than TRL's method made last; return one for each of them, in their order."
        )


def _check_scoring_without_super(rows: StepRows, bitwise: bool) -> None:
    what = "_generate_and_score_completions does not call super()"
    if bitwise:
        raise ConfigError(f"{what}, and bitwise_invariant=True needs this trainer's own sampling; turn one off.")
    reason = "a copy of TRL's method takes advantages of other rows where processes have different numbers"
    refuse_unequal_shares(f"{what}: it", 0 if rows.request.stands_in else len(rows), reason)
    logger.warning_once(
        f"The promise that the split does not matter does not cover this run: {what}, so it may sample in its own "
        "way; only the update is covered."
    )
