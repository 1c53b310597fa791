"""The rollout batches of a run: where the completions of a step come from.

    step -> (new rollout batch?) -> local phase, here or ahead on a thread -> join -> log -> completions of the step

Differs from TRL, which keeps padded slices of its own process. Overrides of TRL's rollout methods are called with TRL's
arguments, here and in `rollouts.worker`; without one a rollout is not put into TRL's dictionary.
Called by the trainer, and by users through TRL's methods.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..batching.prompt_order import ProcessSlices, RolloutRequest, StepDataset, StepLoader, StepRows, make_loader
from ..errors import RewardError
from ..forward.columns import OLD_LOGPS, SAMPLING_LOGPS
from ..forward.snapshot import Weights
from ..rewards.worker import RewardCall
from ..runtime.attributes import temporarily_set
from ..runtime.collectives import (
    any_process,
    gather_lists,
    not_of_users,
    on_all_processes,
    raise_on_all,
    uneven_collectives,
    wait_for_all,
)
from ..runtime.messages import logger
from ..runtime.out_of_memory import Halving, MicroBatchLimits
from ..sampling.engine_check import EngineCheck
from ..sampling.equal_shares import why_equal
from ..sampling.sampler import Sampler, sampler_of
from ..view import TrainerView
from .ahead import Job, RolloutsAhead
from .batch import RolloutBatch, batch_state, saved_batch
from .images import ImageSource
from .join import Round, exchange, join
from .local import LocalRollout, RolloutSettings
from .log import RolloutLog
from .rounds import ScoredBatch, fill_groups, round_by_user
from .settings import read_settings, template_of
from .worker import RolloutWorker, logged_elsewhere, reward_columns

_STAND_INS = (
    "where a rollout batch leaves a process without prompts (the last of an epoch, a small evaluation set, a further "
    "round of dynamic_sampling) it runs on stand-in rows, which would count"
)


@dataclass(frozen=True)
class CurrentBatch:
    """The rollout batch that is trained on."""

    batch: RolloutBatch
    name: tuple[int, int]  # its `RolloutRequest.name`
    sampled_at: int  # the optimizer step whose weights sampled it


@dataclass
class Rollouts:
    """Makes rollout batches and holds the one that is trained on."""

    view: TrainerView
    worker: RolloutWorker
    check: EngineCheck | None  # None without vLLM, or where it is turned off
    log: RolloutLog
    memory: Halving  # the number of completions that fit into one `generate`, of the thread that samples ahead too
    limits: MicroBatchLimits  # of training, which also bound the forwards of a rollout
    # called for each rollout batch: the first step that trains on it, and the step whose weights sampled it
    note: Callable[[int, int, ScoredBatch], None]
    build_ahead: "Callable[[Rollouts], RolloutsAhead]"
    current: CurrentBatch | None = None
    # what a user's `_generate_and_score_completions` is called for while it runs, and what TRL's method has made for
    # it; then what a `_calculate_rewards` is called for
    scoring: tuple[RolloutRequest, list[Round]] | None = None
    rewarding: LocalRollout | None = None
    ahead: RolloutsAhead | None = None  # None without `rollout_lag`, and outside of training
    # rollout batches that a checkpoint names: their first steps, and the weights that sample them
    waiting: Sequence[tuple[int, Weights]] = ()
    threads: int | None = None  # CPU threads of sampling ahead; None: as many as torch has
    steps: Any = None  # the training loader's data set of steps
    refuse_changes: Callable[[], None] = lambda: None  # raises for what cannot be followed
    _has_made_one: bool = False  # a rollout batch, of training or of an evaluation

    @property
    def images(self) -> ImageSource:
        return self.worker.images

    def begin(self, threads: int | None) -> None:
        """Begin a run: its first step samples, and nothing waits to be sampled ahead."""
        self.current, self.waiting, self.threads = None, (), threads

    def state_dict(self) -> dict[str, Any]:
        waiting = self.waiting if self.ahead is None else self.ahead.submitted
        state: dict[str, Any] = {"batch": None, "waiting": waiting_state(waiting)}
        if self.current is not None and (batch := batch_state(self.current.batch)) is not None:
            state |= {"batch": batch, "batch_name": self.current.name, "sampled_at": self.current.sampled_at}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = saved_waiting(state["waiting"])
        if state["batch"] is not None:
            self.current = CurrentBatch(saved_batch(state["batch"]), tuple(state["batch_name"]), state["sampled_at"])

    def slices(self, num_generations: int) -> ProcessSlices:
        accelerator = self.view.accelerator
        # vLLM batches by itself, and tensor parallel engines need as many rows from every process: a chunk is one group
        chunk = self.view.geometry.rollout_chunk_size if self.sampler.pads else num_generations
        return ProcessSlices(num_generations, chunk, accelerator.num_processes, accelerator.process_index)

    def training_loader(self, dataset: Any, shuffle: bool) -> StepLoader:
        """The loader of a run; its rows are also taken for further rounds, and before their step."""
        slices = self.slices(self.view.num_generations)
        loader = make_loader(dataset, slices, self.view.geometry, self.view.args, shuffle)
        self.steps = loader.dataset
        return loader

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None

    @property
    def sampler(self) -> Sampler:
        """What samples now."""
        return sampler_of(self.view, self.worker.engine)

    def settings_now(self) -> RolloutSettings:
        """The settings of a rollout batch that begins now; a ConfigError for a change that cannot be followed."""
        if (prepare := self.images.prepare) is not None and not self._has_made_one and self.ahead is None:
            prepare.processor, prepare.template = self.view.processing_class, template_of(self.view)
        self.refuse_changes()
        unchecked = self.check is not None and not self.check.done
        return read_settings(self.view, self.worker, self.sampler, unchecked, self.limits.tokens)

    def send_weights(self) -> None:
        """Send the current weights to vLLM, by TRL's rule once for each step that samples; a collective."""
        view = self.view
        if view.vllm_generation is None:
            return
        with not_of_users():
            if self.ahead is not None:  # the server may still sample with other weights
                self.ahead.drain()
                wait_for_all()
            if (step := view.state.global_step) != view.weights_sent_at:
                # the main process sends to a server, which every process asks
                with view.profile("sync_weights"), raise_on_all("sending weights"):
                    view.vllm_generation.sync_weights()
                view.note_weights_sent(step)

    # ---- A step's completions -------------------------------------------------------------------------------------

    def completions_of(self, rows: StepRows) -> RolloutBatch:
        """The completions of an optimizer step; the same on every process.

        `rows` are this process's; empty in a map-style data set's step that continues a rollout batch, and with a lag.
        """
        request, args, step = rows.request, self.view.args, self.view.state.global_step
        name = None if self.current is None else self.current.name
        if args.rollout_lag and self.ahead is None:
            self.ahead, self.waiting = self.build_ahead(self), ()
            self.ahead.submit_due(name, 0)
        ahead = self.ahead
        if ahead is not None and not args.dynamic_sampling:
            ahead.submit_due(name, args.rollout_lag)
        if self.current is None or name != request.name:
            if not rows and ahead is None:  # a run that was resumed without its rollout batch
                rows = self.steps.rows(request)
            job = None if ahead is None else ahead.pop_due()
            scored, sampled_at = self.make(rows, job), step if job is None else job.weights.step
            self.note(step + 1, sampled_at, scored)
            self.current = CurrentBatch(scored.batch, request.name, sampled_at)
        if ahead is not None:
            if args.dynamic_sampling:  # whose further prompts enter the queue before the rollout batches after this one
                ahead.submit_due(request.name, args.rollout_lag)
            self.view.metrics["train"]["sampling/staleness"].append(step - self.current.sampled_at)
        return self.current.batch.select(request.layout.step_rows)

    def make(self, rows: StepRows, job: Job | None = None) -> ScoredBatch:
        """Sample and score these rows of every process, and log what TRL logs of them; a collective.

        `job` is the rollout batch that was sampled ahead; it is joined by the settings with which it began.
        """
        settings, args = self.settings_now() if job is None else job.settings, self.view.args
        make_round = functools.partial(self._round, settings=settings, job=job)
        taught = "teacher" in settings.scored_by  # groups with equal rewards learn, too
        fills = args.dynamic_sampling and settings.training and not taught
        if fills:
            made = fill_groups(rows, settings, self.steps, args.dynamic_sampling_max_rounds, make_round)
        else:
            part = make_round(rows)
            made = ScoredBatch(part.batch, part.rewards_BF if part.entries else None, settings, [part])
        if fills or settings.own_scoring is None:  # else TRL's method has logged what it made
            self.log.add(made.rounds, settings, made.metrics)
        self._has_made_one = True
        if made.rewards_BF is not None and torch.isnan(made.rewards_BF).all() and not taught:
            names = ", ".join(settings.functions.names)
            logger.warning(
                f"No completion of this rollout was scored: {names} returned None for all of them, "
                "so there is nothing to learn from; check that the reward functions fit the data."
            )
        return made

    def _round(self, rows: StepRows, *, settings: RolloutSettings, job: Job | None) -> Round:
        if (score := settings.own_scoring) is not None:
            scoring = raise_on_all("scoring", self.worker.forwards.collective_forward)
            asked: tuple[RolloutRequest, list[Round]] = rows.request, []
            with temporarily_set(self, scoring=asked), scoring, self._for_users(rows.request):
                scored = score(list(rows.rows))
            return round_by_user(scored, rows, asked[1], settings, self.view.args, self.images)
        if job is not None:
            assert self.ahead is not None
            local = self.ahead.part_of(job, rows)
            self.worker.show_environments(local.transcripts)
        else:
            if self.view.sharded:
                self.images.refuse_mixed(rows)
            self.send_weights()
            local = self.sample(rows, settings)
        return self.join(local)

    # ---- A round --------------------------------------------------------------------------------------------------

    def sample(self, rows: StepRows, settings: RolloutSettings) -> LocalRollout:
        """This process's part, sampled by the current weights; with several processes an error is its `failure`."""
        try:
            with self._for_users(rows.request):
                return self.worker.sample(rows, settings)
        except Exception as error:
            # other processes may wait for this one in a collective of a forward or of vLLM
            reason = why_equal(self.view.args, self.view.sharded, settings.sampler.whole)
            # rewards come after the log-probabilities, which members of a group compute together
            in_groups = self.worker.forwards.group is not None and settings.scored_by
            waited_for = in_groups and not isinstance(error, RewardError)
            if reason or waited_for or on_all_processes(error) or self.view.accelerator.num_processes == 1:
                raise
            return LocalRollout(rows.request, settings, failure=error)

    def join(self, local: LocalRollout) -> Round:
        calculate, view = local.settings.own_rewards, self.view
        shares, texts = exchange(local, self.images, view.takes_images and view.log_multimodal)
        count = sum(len(share.entries) for share in shares)
        rewards = None if calculate is None else self._rewards_by_user(local, calculate, count)
        joined = join(local, shares, texts, view.accelerator.process_index, rewards)
        if self.check is not None and not local.settings.by_user:
            columns: Mapping[str, Any] = joined.batch.columns
            known = (columns[name].values if name in columns else None for name in (OLD_LOGPS, SAMPLING_LOGPS))
            self.check.compare(joined.batch.loss_masks.values, *known)
        if not local.settings.trained_on:
            joined.batch = joined.batch.having(OLD_LOGPS, None)
        return joined

    def _rewards_by_user(
        self, local: LocalRollout, calculate: Callable[..., Any], completions: int
    ) -> tuple[torch.Tensor, list[RewardCall]]:
        """What the user's `_calculate_rewards` returns for the completions of all processes, and the calls in it."""
        phase, running = self.worker.clock.phase("rewards"), temporarily_set(self, rewarding=local)
        with running, raise_on_all("_calculate_rewards"), self._for_users(local.request), phase:
            local.reward_calls = []
            rewards_BF = calculate(*reward_columns(local.transcripts))
            shape = tuple(rewards_BF.shape) if isinstance(rewards_BF, torch.Tensor) else type(rewards_BF).__name__
            if shape != (wanted := (completions, len(local.settings.functions.names))):
                raise RewardError(
                    f"_calculate_rewards returned rewards of shape {shape} where {wanted} is needed: a tensor with a "
                    "row for each completion of all processes and a column for each reward function. Change values of "
                    "what super() returns, not its shape; a further reward belongs in reward_funcs."
                )
            return rewards_BF.cpu(), [*local.reward_calls, *gather_lists(logged_elsewhere(local))]

    def _for_users(self, request: RolloutRequest) -> AbstractContextManager[None]:
        """Inside, code of a user runs, and its collectives leave out stand-in rows."""
        # found now, not in a further round or at an epoch's end
        some = request.stands_in or self.view.args.dynamic_sampling
        if isinstance(self.steps, StepDataset):
            last = min(len(self.steps.layout), self.view.state.max_steps) - 1
            some = some or self.steps.request(last).stands_in
        refused = any_process(some) and not self.view.sharded
        return uneven_collectives(
            self.view.accelerator, lambda: request.stands_in, others_refused=_STAND_INS if refused else None
        )


def waiting_state(waiting: Sequence[tuple[int, Weights]]) -> dict[str, Any]:
    """First steps of rollout batches and the weights that sample them, of which each is stored once."""
    weights = {part.step: vars(part) for _, part in waiting}
    return {"steps": [[step, part.step] for step, part in waiting], "weights": list(weights.values())}


def saved_waiting(state: dict[str, Any]) -> list[tuple[int, Weights]]:
    """The pairs of `waiting_state`; those with the same weights share one object."""
    weights = {part.step: part for part in (Weights(**fields) for fields in state["weights"])}
    return [(step, weights[sampled_by]) for step, sampled_by in state["steps"]]
