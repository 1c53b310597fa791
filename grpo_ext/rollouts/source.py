"""The rollout batches of a run: where the completions of a step come from.

    step -> (new rollout batch?) -> local phase, here or ahead on a thread -> join -> log -> completions of the step

Differs from TRL, which keeps padded slices of its own process. Overrides of TRL's rollout methods are called here, with
TRL's arguments; without one a rollout is not put into TRL's dictionary. Called by the trainer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from ..algorithms.advantages import fill_places
from ..batching.prompt_order import ProcessSlices, RolloutRequest, StepDataset, StepRows
from ..batching.sizes import BatchGeometry, StepLayout, ceil_div
from ..config import GRPOConfig
from ..errors import ConfigError, RolloutError
from ..forward.snapshot import Weights
from ..runtime.attributes import assigned
from ..runtime.collectives import any_process, gather_lists, of_ours, on_all_processes, together, uneven_collectives
from ..runtime.out_of_memory import Halving
from .ahead import RolloutsAhead
from .batch import ROW_IMAGES, RolloutBatch, gather_scored
from .engine_check import EngineCheck
from .images import ImageSource
from .join import Round, exchange, join
from .keyed import BEYOND
from .local import LocalRollout, Terms
from .overrides import MainWorker
from .records import add_to_table, rollout_metrics
from .rollout_func import refuse_unequal_shares, why_equal
from .trl_shapes import trl_dictionary
from .worker import logged_elsewhere, reward_columns

logger = get_logger(__name__)

_STAND_INS = (
    "where a rollout batch leaves a process without prompts (the last of an epoch, a small evaluation set, a further "
    "round of dynamic_sampling) it runs on stand-in rows, which would count"
)


@dataclass
class Rollouts:
    """Makes rollout batches and holds the one that is trained on.

    Attributes:
        memory: the number of completions that fit into one `generate`, of the thread that samples ahead too.
        sync_vllm: sends the current weights to vLLM.
        check: compares vLLM's log-probabilities with the trainer's; None without vLLM, or where it is turned off.
        batch, batch_name: the rollout batch that is trained on, and its name (`RolloutRequest.name`).
        rewards_BF, scored_by: rewards of the rollout batch that was made last, of training or of an evaluation, and its
            terms; None before.
        ahead: what samples ahead; None without `rollout_lag`, and outside of training.
        recheck: raises for what was changed since the trainer was built, and cannot be followed.
        sampled_at: the optimizer step whose weights sampled the rollout batch.
        waiting: rollout batches that a checkpoint names: their first steps, and the weights that sample them.
        threads: CPU threads of sampling ahead; None: as many as torch has.
        steps: the training loader's data set of steps.
    """

    accelerator: Accelerator
    args: GRPOConfig
    worker: MainWorker
    memory: Halving
    sync_vllm: Callable[[], None]
    check: EngineCheck | None = None
    recheck: Callable[[], None] = field(default=lambda: None, init=False)
    batch: RolloutBatch | None = field(default=None, init=False)
    batch_name: tuple[int, int] | None = field(default=None, init=False)
    rewards_BF: torch.Tensor | None = field(default=None, init=False)
    scored_by: Terms | None = field(default=None, init=False)
    ahead: RolloutsAhead | None = field(default=None, init=False)
    _warned_of_truncation: bool = field(default=False, init=False)
    sampled_at: int = field(default=0, init=False)
    waiting: Sequence[tuple[int, Weights]] = field(default=(), init=False)
    threads: int | None = field(default=None, init=False)
    steps: Any = field(default=None, init=False)
    # while a user's `_generate_and_score_completions` runs: the request, and a round for each call of TRL's method
    _scored: tuple[RolloutRequest, list[Round]] | None = field(default=None, init=False)
    _rewarded: LocalRollout | None = field(default=None, init=False)  # while a user's `_calculate_rewards` runs
    _free_requests: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)

    @property
    def images(self) -> ImageSource:
        """Where the images of rows come from."""
        return self.worker.images

    def hold(self, batch: RolloutBatch | None, name: tuple[int, int] | None) -> None:
        """Train on a rollout batch of this name; None: the next step samples."""
        self.batch, self.batch_name = batch, name

    def forget_rollout(self) -> None:
        """The next step samples, and nothing waits to be sampled ahead."""
        self.batch, self.batch_name, self.waiting = None, None, ()

    def slices(self, num_generations: int) -> ProcessSlices:
        """How rollout batches are divided over the processes for sampling."""
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        # vLLM batches by itself, and tensor parallel engines need as many rows from every process: a chunk is one group
        chunk = num_generations if self.args.use_vllm else self.args.geometry.rollout_chunk_size
        return ProcessSlices(num_generations, chunk, processes, rank)

    def resize_chunks(self, geometry: BatchGeometry) -> None:
        """Sample and score in the chunks of `geometry` from now on."""
        self.args.geometry = geometry
        if not self.args.use_vllm:
            self.worker.settings.resize_chunks(geometry)

    def divide_threads(self) -> int | None:
        """CPU threads of training, where sampling ahead takes half of them; None: as many as torch has."""
        if not self.args.rollout_lag:
            return None
        if self.args.bitwise_invariant:
            self.threads = self.args.bitwise_threads
        elif self.accelerator.device.type == "cpu":
            self.threads = max(1, torch.get_num_threads() // 2)
            return max(1, torch.get_num_threads() - self.threads)
        return None

    def close(self) -> None:
        """Stop sampling ahead."""
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None

    def completions_of(self, rows: StepRows, terms: Terms) -> RolloutBatch:
        """The completions of an optimizer step, or of an evaluation; the same on every process.

        Args:
            rows: of this process; empty in a map-style data set's step that continues a rollout batch, and with a lag.
        """
        request = rows.request
        if not terms.training:
            return self.make(rows, terms)
        if self.batch is None or self.batch_name != request.name:
            if not rows and self.ahead is None:  # a run that was resumed without its rollout batch
                rows = self.steps.rows(request)
            self.hold(self.make(rows, terms), request.name)
        assert self.batch is not None
        return self.batch.select(request.layout.step_rows)

    def make(self, rows: StepRows, terms: Terms) -> RolloutBatch:
        """Sample and score these rows of every process, and log what TRL logs of them."""
        if self.ahead is not None and terms.training:  # joined by the settings with which it began
            terms = dataclasses.replace(self.ahead.jobs[0].terms, state=terms.state)
        if self.args.dynamic_sampling and terms.training:
            return self._in_rounds(rows, terms)
        sampled = self._round(rows, terms)
        if terms.hooks.score is None:
            self._log([sampled], terms)
        self._take_rewards(sampled.rewards_BF if sampled.entries else None, terms)
        return sampled.batch

    def _take_rewards(self, rewards_BF: torch.Tensor | None, terms: Terms) -> None:
        self.rewards_BF, self.scored_by = rewards_BF, terms
        if rewards_BF is not None and torch.isnan(rewards_BF).all():
            names = ", ".join(terms.rewards.names)
            logger.warning(
                f"No completion of this rollout was scored: {names} returned None for all of them, "
                "so there is nothing to learn from; check that the reward functions fit the data."
            )

    # ---- One round ------------------------------------------------------------------------------------------------

    def _round(self, rows: StepRows, terms: Terms) -> Round:
        if (score := terms.hooks.score) is not None:
            return self._scored_by_user(rows, terms, score)
        if self.ahead is not None and terms.training:
            local = self.ahead.part_of(rows)
            self.sampled_at = self.ahead.jobs[0].weights.step
            self.worker.show_environments(local.transcripts)
            return self._joined(local, terms)
        if self.worker.settings.sharded:
            self.images.refuse_mixed(rows)
        return self._joined(self._sampled(rows, terms), terms)

    def _sampled(self, rows: StepRows, terms: Terms, repeat: int = 0) -> LocalRollout:
        with of_ours():
            self.sync_vllm()
        request, hooks = rows.request, terms.hooks
        try:
            with self._for_users(request, terms):
                return self.worker.sample(rows, terms, repeat)
        except Exception as error:
            # other processes may wait for this one in a collective of a forward or of vLLM
            reason = why_equal(self.args, self.worker.settings.sharded, rollout_func=hooks.rollout is not None)
            if reason or on_all_processes(error) or self.accelerator.num_processes == 1:
                raise
            return LocalRollout(request, terms, failure=error)

    def _for_users(self, request: RolloutRequest, terms: Terms) -> AbstractContextManager[None]:
        """Inside, code of a user runs, and its collectives leave out stand-in rows."""
        some = request.empty or self.args.dynamic_sampling  # found now, not in a further round or at an epoch's end
        if isinstance(self.steps, StepDataset):
            some = some or self.steps.request(min(len(self.steps.layout), terms.state.max_steps) - 1).empty
        refused = any_process(some) and not self.worker.settings.sharded
        return uneven_collectives(
            self.accelerator, lambda: request.empty, others_refused=_STAND_INS if refused else None
        )

    def _joined(self, local: LocalRollout, terms: Terms) -> Round:
        """Join the parts of all processes; a collective."""
        shares = exchange(local, self.images)
        calculate, rewards = terms.hooks.rewards, None
        if calculate is not None:
            local.reward_calls = []
            phase, at = self.worker.clock.phase("rewards"), "_calculate_rewards"
            with assigned(self, _rewarded=local), together(at), self._for_users(local.request, terms), phase:
                rewards_BF = calculate(*reward_columns(local.transcripts))
                rewards = rewards_BF.cpu(), [*local.reward_calls, *gather_lists(logged_elsewhere(local))]
        joined = join(shares, terms, self.accelerator.process_index, rewards)
        if self.check is not None and not terms.hooks.sampling:
            self.check.compare(joined.batch)
        if not terms.old_logps:  # computed for the check alone
            joined.batch.columns.pop("old_per_token_logps", None)
        return joined

    # ---- Several rounds: dynamic sampling -------------------------------------------------------------------------

    def _in_rounds(self, rows: StepRows, terms: Terms) -> RolloutBatch:
        """Groups of further prompts replace groups without variance; logged as one rollout batch."""
        request, group, rule, weights_F = rows.request, terms.num_generations, terms.rule, terms.weights_F
        rounds: list[Round] = []
        has_variance: list[list[bool]] = []
        places: list[tuple[int, int]] = []
        next_rows: StepRows | None = rows
        open_places = prompts_used = 0
        while next_rows is not None and len(rounds) <= self.args.dynamic_sampling_max_rounds:
            rounds.append(self._round(next_rows, terms))
            constant = rule.constant_groups(rounds[-1].rewards_BF, weights_F, group)
            has_variance.append([not value for value in constant.tolist()])
            prompts_used += len(constant) if len(rounds) > 1 else 0
            places, open_places = fill_places(has_variance)
            next_rows = self.steps.further_rows(request, prompts_used, open_places) if open_places else None
        self._log(rounds, terms)
        groups = sum(map(len, rounds)) // group
        values = {
            "rounds": len(rounds) - 1,
            "sampled_groups": groups,
            "replaced_groups": len({source for source in places if source[0]}),
            "groups_without_variance": open_places,
        }
        for name, value in values.items():
            terms.metrics[f"dynamic_sampling/{name}"].append(value)
        starts = [sum(map(len, rounds[:number])) for number in range(len(rounds))]
        chosen = [starts[number] + place * group + i for number, place in places for i in range(group)]
        rewards_BF = torch.cat([part.rewards_BF for part in rounds])[chosen]
        batch = RolloutBatch.joined([part.batch for part in rounds], group).select(chosen)
        batch.groups = rounds[0].batch.groups
        if len(rounds) > 1 and rule.depends_on_the_batch:
            batch.columns["advantages"] = rule.advantages(rewards_BF, weights_F, group)
        self._take_rewards(rewards_BF, terms)
        return batch

    def _log(self, rounds: Sequence[Round], terms: Terms) -> None:
        """TRL's metrics and table of all completions that were sampled."""
        state = terms.state
        if terms.training:
            entries = [entry for part in rounds for entry in part.entries]
            state.num_input_tokens_seen += sum(entry.prompt_tokens + entry.tokens for entry in entries)
        terms.metrics["num_tokens"] = [state.num_input_tokens_seen]
        for name, value in rollout_metrics(rounds, terms, with_tools=bool(terms.chat.tools)):
            terms.metrics[name].append(value)
            if name == "sampling/kept_mass" and terms.training and not terms.replay.masks:
                self._warn_of_truncation(value, terms)
        for part in rounds:
            add_to_table(part, terms)

    def _warn_of_truncation(self, kept_mass: float, terms: Terms) -> None:
        if not self._warned_of_truncation:
            self._warned_of_truncation = True
            filters = ", ".join(f"{name}={value}" for name, value in terms.truncating.items())
            logger.warning(
                f"{filters}: sampling kept {kept_mass:.3f} of the probability in the first rollout, and training takes "
                "log-probabilities over the whole vocabulary, as TRL does; sampling_mask='replay' takes them over what "
                "was kept."
            )

    # ---- What users override --------------------------------------------------------------------------------------

    def _scored_by_user(self, rows: StepRows, terms: Terms, score: Callable[..., dict[str, Any]]) -> Round:
        """A round by the user's `_generate_and_score_completions`, which returns the rollout."""
        request = rows.request
        rounds: list[Round] = []
        sharded = self.worker.settings.sharded
        with assigned(self, _scored=(request, rounds)), together("scoring", sharded), self._for_users(request, terms):
            scored = score(list(rows.rows))
        batch = gather_scored(scored, 0 if request.empty else len(rows), request.num_generations)
        scored_once = len(rounds) == 1 and len(rounds[0]) == len(batch)
        if self.args.dynamic_sampling and terms.training and not scored_once:
            raise RolloutError(
                f"_generate_and_score_completions returned {len(batch)} completions and called TRL's method "
                f"{len(rounds)} time(s), for {sum(map(len, rounds))}; dynamic_sampling=True needs the rewards of what "
                "it returns. Call super() once, for the rows that are returned, or set it to False."
            )
        if not rounds:  # it did not call TRL's method
            self._check_scoring_without_super(rows)
            unknown_BF = torch.full((len(batch), len(terms.rewards.names)), torch.nan)
            return Round(batch, unknown_BF, torch.zeros(len(batch)), entries=[], reward_calls=[], local_rows=range(0))
        last = rounds[-1]
        if self.images.prepare is not None:
            pairs = zip(last.batch["prompt_ids"], batch["prompt_ids"])
            if len(last) != len(batch) or not all(torch.equal(ids, row[-len(ids) :]) for ids, row in pairs):
                raise RolloutError(
                    "_generate_and_score_completions returned other rows of a model that takes images, or in another "
                    "order, than TRL's method made last; return one for each of them, in their order."
                )
            batch.columns[ROW_IMAGES] = last.batch[ROW_IMAGES]
        return dataclasses.replace(last, batch=batch)

    def _check_scoring_without_super(self, rows: StepRows) -> None:
        """Warn that an override without `super()` samples in its own way, or refuse it."""
        what = "_generate_and_score_completions does not call super()"
        if self.args.bitwise_invariant:
            raise ConfigError(f"{what}, and bitwise_invariant=True needs this trainer's own sampling; turn one off.")
        reason = "a copy of TRL's method takes advantages of other rows where processes have different numbers"
        refuse_unequal_shares(f"{what}: it", 0 if rows.request.empty else len(rows), reason)
        logger.warning_once(
            f"The promise that the split does not matter does not cover this run: {what}, so it may sample in its own "
            "way; only the update is covered."
        )

    def score(self, inputs: Sequence[dict[str, Any]], terms: Terms) -> dict[str, Any]:
        """TRL's `_generate_and_score_completions` of any rows; rollouts.overrides has their random numbers."""
        rows, rounds = list(inputs), [] if self._scored is None else self._scored[1]
        request = self._request(rows, terms.num_generations)
        local = self._sampled(StepRows(rows, request), terms, repeat=len(rounds))
        rounds.append(self._joined(local, terms))
        if self._scored is None or not (self.args.dynamic_sampling and terms.training):
            self._log(rounds[-1:], terms)
        return trl_dictionary(local, rounds[-1], self.images, self.worker.settings)

    def _request(self, rows: Sequence[Mapping[str, Any]], group: int) -> RolloutRequest:
        """The request of a user's override, or a new one, with the columns of all processes' rows; a collective."""
        columns = tuple(dict.fromkeys(name for keys in gather_lists([list(row) for row in rows]) for name in keys))
        if self._rewarded is not None:
            return dataclasses.replace(self._rewarded.request, columns=columns)
        if self._scored is not None:
            return dataclasses.replace(self._scored[0], columns=columns)
        prompts, rank = ceil_div(len(rows), group), self.accelerator.process_index
        layout = StepLayout(BEYOND + next(self._free_requests), 0, 0, range(prompts), range(len(rows)))
        return RolloutRequest(0, layout, range(rank * prompts, (rank + 1) * prompts), False, group, columns=columns)

    def rewards(self, columns: tuple[Any, ...], terms: Terms) -> torch.Tensor:
        """TRL's `_calculate_rewards` of this process's `reward_columns`: (B, F) of all processes, in global order."""
        request = self._request(columns[0], terms.num_generations)
        local = self._rewarded or LocalRollout(request, terms)
        local.request = request
        if local.request.empty:
            columns = ([], [], [], [])
        rewards_BF, calls = self.worker.compute_rewards(local, *columns)
        shares = gather_lists([(rewards_BF, calls)])
        if self._rewarded is None:  # called by other code of the user, which logs where TRL's methods do
            metrics, extra = terms.pending
            for call in calls:
                for name, value in call.metrics:
                    metrics.setdefault(name, []).append(value)
                for name, values in call.columns.items():
                    extra.setdefault(name, []).extend(values)
        local.reward_calls = [call for _, part in shares for call in part]
        return torch.cat([rewards for rewards, _ in shares]).to(self.accelerator.device)
