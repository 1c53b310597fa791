"""One round of a rollout batch: this process's part, and the join with the others'.

A rollout batch is one round; dynamic sampling adds some. Called by `Rollouts`, and by users through TRL's methods.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..batching.prompt_order import RolloutRequest, StepDataset, StepRows
from ..runtime.collectives import any_process, gather_lists, on_all_processes, together, uneven_collectives
from ..view import TrainerView
from .engine_check import EngineCheck
from .equal_shares import why_equal
from .join import Round, exchange, join
from .local import LocalRollout, RolloutSettings
from .overrides import MainWorker, RewardsCall
from .worker import logged_elsewhere, reward_columns

_STAND_INS = (
    "where a rollout batch leaves a process without prompts (the last of an epoch, a small evaluation set, a further "
    "round of dynamic_sampling) it runs on stand-in rows, which would count"
)


@dataclass
class RoundMaker:
    """Makes rounds in the main thread.

    Attributes:
        check: compares vLLM's log-probabilities with the trainer's; None without vLLM, or where it is turned off.
        steps: the training loader's data set of steps.
    """

    view: TrainerView
    worker: MainWorker
    check: EngineCheck | None = None
    steps: Any = field(default=None, init=False)

    def sample(self, rows: StepRows, settings: RolloutSettings, repeat: int = 0) -> LocalRollout:
        """This process's part, sampled by the current weights; with several processes an error is its `failure`.

        Args:
            repeat: how often a user's override has called TRL's method before.
        """
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
        some = (
            request.empty or self.view.args.dynamic_sampling
        )  # found now, not in a further round or at an epoch's end
        if isinstance(self.steps, StepDataset):
            last = min(len(self.steps.layout), self.view.state.max_steps) - 1
            some = some or self.steps.request(last).empty
        refused = any_process(some) and not self.worker.settings.sharded
        return uneven_collectives(
            self.view.accelerator, lambda: request.empty, others_refused=_STAND_INS if refused else None
        )

    def join(self, local: LocalRollout, settings: RolloutSettings, shows_images: bool) -> Round:
        """Join the parts of all processes; a collective.

        Args:
            shows_images: the table of completions shows images.
        """
        shares = exchange(local, self.worker.images, shows_images)
        hooks, rewards = settings.sampling.hooks, None
        if hooks.rewards is not None:
            local.reward_calls = []
            phase, running = self.worker.clock.phase("rewards"), self.worker.calls.running(RewardsCall(local))
            with running, together("_calculate_rewards"), self.for_users(local.request), phase:
                rewards_BF = hooks.rewards(*reward_columns(local.transcripts))
                rewards = rewards_BF.cpu(), [*local.reward_calls, *gather_lists(logged_elsewhere(local))]
        joined = join(shares, settings, self.view.accelerator.process_index, rewards)
        if self.check is not None and not hooks.sampling:
            self.check.compare(joined.batch)
        if not settings.logprobs.trained_on:
            joined.batch.columns.pop("old_per_token_logps", None)
        return joined
