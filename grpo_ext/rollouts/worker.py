"""The local phase: one process's part of a rollout batch, from rows to rewards.

    rows -> begin -> generate <-> answer -> log-probabilities -> rewards

Differs from TRL, which gathers in between. A worker holds no trainer,
because with `rollout_lag` a second one runs on a thread, with copies of the models. docs/architecture.md lists what
processes exchange meanwhile.
"""

import contextlib
import itertools
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..batching.prompt_order import StepRows, request_keys
from ..compat import as_reference
from ..errors import RolloutError
from ..forward.columns import EXPERTS, MODEL_LOGPS
from ..forward.rows import TokenRows
from ..forward.runner import ForwardLimits, ForwardRunner
from ..rewards.runner import RewardRows, RewardRunner
from ..rewards.worker import RewardCall
from ..runtime.attributes import temporarily_set
from ..runtime.clock import PhaseClock
from ..runtime.collectives import any_process
from ..sampling.engine import Engine, EngineSettings
from ..sampling.sampler import Sampler
from ..sampling.turn import Turn
from .batch import RolloutBatch
from .images import ImageSource, first_alike
from .join import token_columns
from .local import LocalRollout, RolloutSettings
from .tools import continue_with
from .transcript import Transcript, share_prompt_experts

# rows, prompts, completions, token ids: the arguments of reward functions
RewardColumns = tuple[list[Any], list[Any], list[Any], list[Any]]


class Models(NamedTuple):
    policy: Any
    reference: Any | None  # None: the policy without its adapter
    teacher: Any | None


@dataclass
class RolloutWorker:
    """Makes one process's part of rollout batches, in the main thread or on the thread that samples ahead."""

    forwards: ForwardRunner
    models: Callable[[], Models]
    engine: Engine
    rewards: RewardRunner
    images: ImageSource
    clock: PhaseClock
    settings: EngineSettings
    # called with the transcripts once their environments are reset
    show_environments: Callable[[Sequence[Transcript]], None]
    retired: dict[int, Any] = field(default_factory=dict)  # see `Environments`
    in_progress: LocalRollout | None = None  # whose `rollout_func` runs
    # takes the place of the user's `_calculate_rewards` where a step is run again
    known_rewards: Callable[..., torch.Tensor] | None = None

    @property
    def shards_vision(self) -> bool:
        """Whether forwards with and without images are different collectives."""
        return self.settings.sharded and self.images.prepare is not None

    def sample(self, rows: StepRows, settings: RolloutSettings) -> LocalRollout:
        """Sample this process's part of a rollout batch, with log-probabilities and rewards."""
        local = LocalRollout(rows.request, settings)
        by_user = settings.by_user or settings.own_rewards is not None  # whose code may hold collectives
        if not rows.request.stands_in or by_user or self.shards_vision:
            local.transcripts = self.begin(rows, settings)
        self.run_turns(local)
        if empty := [transcript.prompt for transcript in local.transcripts if not transcript.ids]:
            raise RolloutError(
                f"the completion of the prompt {reprlib.repr(empty[0])} has no tokens; what samples it (an "
                "override, the model's generate or vLLM) has to return at least the end token."
            )
        share_prompt_experts(local.transcripts, local.request.num_generations)
        self.add_logprobs(local)
        self.add_rewards(local)
        return local

    # ---- Prompts --------------------------------------------------------------------------------------------------

    def begin(self, rows: StepRows, settings: RolloutSettings) -> list[Transcript]:
        """Make transcripts of rows: reset their environments, and put images into their messages."""
        keys = request_keys(rows.request, len(rows), settings.seed, settings.training)
        columns = enumerate(itertools.zip_longest(rows.rows, keys, rows.numbers))
        transcripts = [Transcript(key, place, number, row=row) for place, (row, key, number) in columns]
        settings.toolbox.environments.begin(transcripts, settings.limits.seconds)
        for transcript in transcripts:
            transcript.set_prompt(settings.chat.with_images(transcript.prompt, transcript.row))
        self.show_environments(transcripts)
        return transcripts

    def tokenize(self, transcripts: Sequence[Transcript], settings: RolloutSettings) -> None:
        for place, (transcript, first) in enumerate(zip(transcripts, first_alike(transcripts), strict=True)):
            if first < place:
                transcript.prompt_ids = list(transcripts[first].prompt_ids)
                continue
            chat = settings.chat.of_row(transcript.row)
            transcript.prompt_ids = chat.tokenize(transcript.prompt, transcript.environment_name)
            chat.check_ids(transcript.prompt_ids, f"the prompt {reprlib.repr(transcript.prompt)}")

    # ---- Turns ----------------------------------------------------------------------------------------------------

    def run_turns(self, local: LocalRollout) -> None:
        """The model writes, tools answer, until no transcript wants a turn."""
        settings, transcripts = local.settings, local.transcripts
        if not settings.sampler.whole:
            self.tokenize(transcripts, settings)
        with temporarily_set(self, in_progress=local if settings.sampler.whole else None):
            turns = self.generate(local, transcripts, settings.sampler)
        local.has_mask = any(turn.mask is not None for turn in turns)
        for transcript, turn in zip(transcripts, turns, strict=True):
            transcript.add_turn(turn)
            if turn.returned is not None:
                turn.returned.check(settings.limits.max_completion_length)
        settings.chat.decode(transcripts)
        if not settings.chat.tools:
            return
        local.has_mask = True
        active = [] if local.request.stands_in else transcripts
        any_active = any_process if self.settings.sharded else bool
        while any_active(bool(active := settings.toolbox.answer(active, settings.chat, settings.limits))):
            for transcript, turn in zip(active, self.generate(local, active, settings.sampler.turns), strict=True):
                continue_with(transcript, turn, settings.chat, settings.limits)

    def generate(self, local: LocalRollout, transcripts: list[Transcript], sampler: Sampler) -> list[Turn]:
        """Sample one turn of some transcripts; all processes call it for every turn where a forward is a collective."""
        with self.clock.phase("rollout"):
            sampled = self.sample_turn(local, transcripts, sampler)
        if len(sampled) != len(transcripts):
            raise RolloutError(
                f"{len(sampled)} completions were sampled for {len(transcripts)} prompts; each prompt needs one. If "
                "the generation failed, the log above says why."
            )
        return [t if t.ended is not None else replace(t, ended=local.ended(t.last_ids)) for t in sampled]

    def sample_turn(self, local: LocalRollout, transcripts: list[Transcript], sampler: Sampler) -> list[Turn]:
        """Sample one turn; a process without prompts gets one token for each stand-in."""
        sizes, stands_in, own = local.settings.sizes, local.request.stands_in or not transcripts, sampler.own
        if not stands_in or sampler.whole or (sampler.by_user is not None and not self.settings.sharded):
            return sampler.sample(transcripts, sizes) if transcripts else []
        rows = []
        if self.shards_vision and own.config is not None:
            # other processes run the image tower, so this one has to; vLLM has weights of its own
            rows = [transcript.prompt_alone() for transcript in local.transcripts[:1]]
        own.sample(rows, sizes)
        logps = [0.0] if "logps" in own.returns else None
        return [Turn.of([self.settings.filler], logps, [[]], ended=True) for _ in transcripts]

    # ---- Log-probabilities and rewards ----------------------------------------------------------------------------

    def add_logprobs(self, local: LocalRollout) -> None:
        if not (names := local.settings.scored_by):
            return
        rows, models, settings = self._token_rows(local), self.models(), local.settings
        limits = ForwardLimits(settings.batch_size, settings.max_tokens, settings.num_generations)
        with self.clock.phase("logps"):
            for name in names:
                model, of_policy = getattr(models, name), name == "policy"
                without_adapter: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
                if model is None:
                    model = models.policy
                    without_adapter = as_reference(self.forwards.accelerator.unwrap_model(model))
                # the reference and the teacher route by themselves
                of_model = rows if of_policy else rows.having(EXPERTS, None)
                with without_adapter, self.forwards.without_gradients(model):
                    records = settings.record_experts and of_policy
                    logps_S, experts_NC = self.forwards.rollout_log_probs(model, of_model, limits, records)
                scored, tokens = rows.by_completion(rows.scored_B), rows.by_completion(rows.lengths_B)
                parts = logps_S.cpu().split(scored), itertools.pairwise(itertools.accumulate(tokens, initial=0))
                if not local.transcripts:  # beside a stand-in row
                    continue
                for transcript, logps_T, (start, stop) in zip(local.transcripts, *parts, strict=True):
                    # none of the tokens of a completion that is masked out
                    known = logps_T if len(logps_T) else logps_T.new_zeros(len(transcript.ids))
                    transcript.columns[MODEL_LOGPS[name]] = known
                    if experts_NC is not None:
                        transcript.columns[EXPERTS] = experts_NC[start:stop]
                if experts_NC is not None:
                    share_prompt_experts(local.transcripts, local.request.num_generations)

    def _token_rows(self, local: LocalRollout) -> TokenRows:
        """The transcripts for a forward, without the tokens of completions that are masked out."""
        transcripts = local.transcripts
        if not transcripts:  # a stand-in row: a forward may be a collective, and a user's override may hold one
            return TokenRows(torch.tensor([self.settings.filler] * 2), [1], [1], [])
        batch = RolloutBatch.of_columns(token_columns(local, transcripts), local.request.num_generations)
        return batch.token_rows(self.images.of_transcripts(local.settings.shown(transcripts)), batch.group_lengths)

    def add_rewards(self, local: LocalRollout) -> None:
        """Compute the rewards, unless the user's `_calculate_rewards` makes them after `exchange`."""
        if local.settings.own_rewards:
            return
        with self.clock.phase("rewards"):
            given = reward_columns(local.real_transcripts)
            local.rewards_BF, calls = self.compute_rewards(local, given, local.request.columns)
            local.reward_calls = [*calls, *logged_elsewhere(local)]
            if self.settings.sharded and not local.real_transcripts:  # reward models may be sharded too
                filler = RewardRows([{}], [""], [""], [[]])
                self.rewards.join_remaining_forwards(local.settings.functions, filler)

    def compute_rewards(
        self, local: LocalRollout, given: RewardColumns, names: Sequence[str]
    ) -> tuple[torch.Tensor, list[RewardCall]]:
        """Rewards (B, F) of what `reward_columns` returns, which a user's `_calculate_rewards` may have changed.

        `names` are those of the columns, as in `RewardRows`.
        """
        settings = local.settings
        rows = RewardRows(
            *given,
            environments=[t.environment for t in local.real_transcripts if t.environment is not None] or None,
            retired=self.retired,
            first=local.first,
            chunk=settings.sizes.chunk,
            state=settings.state,
            log_extra=settings.log_extra,
            names=names,
        )
        with self.rewards.profile("_calculate_rewards"):
            return self.rewards.compute(settings.functions, rows)


def reward_columns(transcripts: Sequence[Transcript]) -> RewardColumns:
    """The arguments of reward functions: rows, prompts, completions, token ids."""
    rows, prompts, completions = ([getattr(t, name) for t in transcripts] for name in ("row", "prompt", "completion"))
    return rows, prompts, completions, [t.ids if t.returned is None else t.returned.ids for t in transcripts]


def logged_elsewhere(local: LocalRollout) -> list[RewardCall]:
    """Take what was logged with TRL's methods outside a reward function, as one further call, and clear it there.

    Runs on the thread that computes the rewards: with `rollout_lag` the other one may be at another rollout batch.
    """
    metrics, columns = local.settings.pending_metrics, local.settings.pending_columns
    if not metrics and not columns:
        return []
    values = [(name, value) for name, numbers in metrics.items() for value in numbers]
    table = {name: list(entries) for name, entries in columns.items()}
    metrics.clear()
    columns.clear()
    return [RewardCall("log_extra", -1, local.first, len(local.real_transcripts), values, table)]
