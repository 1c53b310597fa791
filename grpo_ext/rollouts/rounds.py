"""One round of a rollout batch: this process's part and the join with the others', or what a user's override returns.

A rollout batch is one round. Dynamic sampling adds some: groups of further prompts replace groups without variance;
which group takes which place depends only on rewards and the data, never on the split. Called by `Rollouts`, and by
users through TRL's methods.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.logging import get_logger

from ..algorithms.advantages import fill_places
from ..batching.prompt_order import RolloutRequest, StepDataset, StepRows
from ..errors import ConfigError, RolloutError
from ..runtime.collectives import any_process, gather_lists, on_all_processes, together, uneven_collectives
from ..view import TrainerView
from .batch import ROW_IMAGES, RolloutBatch, gather_scored
from .engine_check import EngineCheck
from .equal_shares import refuse_unequal_shares, why_equal
from .join import Round, exchange, join
from .local import LocalRollout, RewardsCall, RewardSettings, RolloutSettings, ScoreCall
from .worker import RolloutWorker, logged_elsewhere, reward_columns

logger = get_logger(__name__)

_STAND_INS = (
    "where a rollout batch leaves a process without prompts (the last of an epoch, a small evaluation set, a further "
    "round of dynamic_sampling) it runs on stand-in rows, which would count"
)


@dataclass(frozen=True)
class FilledBatch:
    """A rollout batch whose groups without variance were replaced."""

    rounds: list[Round]  # all that was sampled for it
    batch: RolloutBatch
    rewards_BF: torch.Tensor  # of its completions
    chosen: list[int]  # which completions of the rounds, one after the other, are the batch
    metrics: dict[str, int]  # log values, under `dynamic_sampling/`


@dataclass
class RoundMaker:
    """Makes rounds in the main thread."""

    view: TrainerView
    worker: RolloutWorker
    check: EngineCheck | None  # None without vLLM, or where it is turned off
    steps: Any = field(default=None, init=False)  # the training loader's data set of steps

    def sample(self, rows: StepRows, settings: RolloutSettings, repeat: int = 0) -> LocalRollout:
        """This process's part, sampled by the current weights; with several processes an error is its `failure`."""
        try:
            with self.for_users(rows.request):
                return self.worker.sample(rows, settings, repeat)
        except Exception as error:
            # other processes may wait for this one in a collective of a forward or of vLLM
            by_function = settings.sampling.hooks.rollout is not None
            reason = why_equal(self.view.args, self.worker.settings.sharded, by_function)
            if reason or on_all_processes(error) or self.view.accelerator.num_processes == 1:
                raise
            return LocalRollout(rows.request, settings, failure=error)

    def for_users(self, request: RolloutRequest) -> AbstractContextManager[None]:
        """Inside, code of a user runs, and its collectives leave out stand-in rows."""
        # found now, not in a further round or at an epoch's end
        some = request.stands_in or self.view.args.dynamic_sampling
        if isinstance(self.steps, StepDataset):
            last = min(len(self.steps.layout), self.view.state.max_steps) - 1
            some = some or self.steps.request(last).stands_in
        refused = any_process(some) and not self.worker.settings.sharded
        return uneven_collectives(
            self.view.accelerator, lambda: request.stands_in, others_refused=_STAND_INS if refused else None
        )

    def join(self, local: LocalRollout) -> Round:
        shows_images = self.view.takes_images and self.view.log_multimodal
        shares = exchange(local, self.worker.images, shows_images)
        hooks, rewards = local.settings.sampling.hooks, None
        if hooks.rewards is not None:
            local.reward_calls = []
            phase, running = self.worker.clock.phase("rewards"), self.worker.calls.running(RewardsCall(local))
            with running, together("_calculate_rewards"), self.for_users(local.request), phase:
                rewards_BF = hooks.rewards(*reward_columns(local.transcripts))
                rewards = rewards_BF.cpu(), [*local.reward_calls, *gather_lists(logged_elsewhere(local))]
        joined = join(local.request, shares, local.settings, self.view.accelerator.process_index, rewards)
        if self.check is not None and not hooks.sampling:
            self.check.compare(joined.batch)
        if not local.settings.logprobs.trained_on:
            joined.batch.columns.pop("old_per_token_logps", None)
        return joined

    def by_user(self, rows: StepRows, settings: RolloutSettings, score: Callable[..., dict[str, Any]]) -> Round:
        request, worker, args = rows.request, self.worker, self.view.args
        call = ScoreCall(request)
        with worker.calls.running(call), together("scoring", worker.settings.sharded), self.for_users(request):
            scored = score(list(rows.rows))
        batch = gather_scored(scored, 0 if request.stands_in else len(rows), request.num_generations)
        scored_once = len(call.rounds) == 1 and len(call.rounds[0]) == len(batch)
        if args.dynamic_sampling and settings.sampling.training and not scored_once:
            raise RolloutError(
                f"_generate_and_score_completions returned {len(batch)} completions and called TRL's method "
                f"{len(call.rounds)} time(s), for {sum(map(len, call.rounds))}; dynamic_sampling=True needs the "
                "rewards of what it returns. Call super() once, for the rows that are returned, or set it to False."
            )
        if not call.rounds:  # it did not call TRL's method
            _check_scoring_without_super(rows, args.bitwise_invariant)
            unknown_BF = torch.full((len(batch), len(settings.rewards.functions.names)), torch.nan)
            zeros_B = torch.zeros(len(batch))
            return Round(request, batch, unknown_BF, zeros_B, entries=[], reward_calls=[], local_rows=range(0))
        last = call.rounds[-1]
        if worker.images.prepare is not None:
            _check_same_rows(last, batch)
            batch.columns[ROW_IMAGES] = last.batch[ROW_IMAGES]
        return replace(last, batch=batch)

    def fill(self, rows: StepRows, rewards: RewardSettings, make_round: Callable[[StepRows], Round]) -> FilledBatch:
        """Sample rows, then further prompts for the places of groups without variance; a collective."""
        rule, weights_F, group = rewards.rule, rewards.weights_F, rows.request.num_generations
        rounds: list[Round] = []
        has_variance: list[list[bool]] = []  # of each group, by round
        next_rows: StepRows | None = rows
        while next_rows is not None and len(rounds) <= self.view.args.dynamic_sampling_max_rounds:
            rounds.append(make_round(next_rows))
            constant = rule.constant_groups(rounds[-1].rewards_BF, weights_F, group)
            has_variance.append([not value for value in constant.tolist()])
            places, open_places = fill_places(has_variance)
            next_rows = None
            if open_places:
                next_rows = self.steps.further_rows(rows.request, sum(map(len, has_variance[1:])), open_places)
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
        return FilledBatch(rounds, batch, rewards_BF, chosen, metrics)


def _check_same_rows(last: Round, batch: RolloutBatch) -> None:
    pairs = zip(last.batch["prompt_ids"], batch["prompt_ids"], strict=True)
    if len(last) != len(batch) or not all(torch.equal(ids, row[-len(ids) :]) for ids, row in pairs):
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
