"""The local phase: one process's part of a rollout batch, from rows to rewards, without a word to other processes.

    rows -> begin -> generate <-> answer -> log-probabilities -> rewards

Differs from TRL, whose `_generate_and_score_completions` and `_generate` do this and gather in between. A worker is
built from parts and never from a trainer, because with `rollout_lag` a second one runs on a thread, with copies of the
models. Where a forward is a collective (FSDP, DeepSpeed) processes equalise the number of calls; that is all they
exchange before `join`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from ..algorithms.importance import RatioRule
from ..batching.prompt_order import RolloutRequest
from ..errors import RolloutError
from ..forward.images import RowImages
from ..forward.rows import TokenRows
from ..forward.scorer import Scorer
from ..rewards.calls import RewardCall
from ..rewards.runner import RewardRunner
from ..runtime.clock import PhaseClock
from ..runtime.collectives import any_process
from .chat import Chat, images_in
from .decoding import unique
from .engine import Engine, Sampled
from .environments import Environments
from .tools import Toolbox
from .transcript import Transcript
from .turns import TurnLimits, continue_with

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Hooks:
    """What a user has put in the place of a part of the local phase; None: nothing.

    Attributes:
        tokenize: `_tokenize_prompts`: from prompts, and the names of their environments, to token ids.
        generate: `_generate`: from prompts to TRL's tuple of eight.
        turn: `_generate_single_turn`: from the transcripts of a chunk to what is sampled for each.
        rollout: `rollout_func`, checked: from prompts to its dictionary.
        rewards: `_calculate_rewards` is overridden, so the worker makes none.
    """

    tokenize: Callable[[list[Any], list[str | None]], list[list[int]]] | None = None
    generate: Callable[[list[Any]], Any] | None = None
    turn: Callable[[list[Transcript]], list[Sampled]] | None = None
    rollout: Callable[[list[Any]], dict[str, Any]] | None = None
    rewards: bool = False

    @property
    def any(self) -> bool:
        """Whether a process without prompts has to take part, because a hook may hold collectives."""
        return self.rewards or any(h is not None for h in (self.tokenize, self.generate, self.turn, self.rollout))


@dataclass(frozen=True)
class Terms:
    """What is read of the trainer when a rollout batch is begun, because callbacks may change it.

    Attributes:
        training: or evaluation.
        functions: the reward functions.
        state: of the Trainer, which reward functions are given.
        generation_config: transformers' settings; None with vLLM.
        old_logps, reference: log-probabilities are needed of the policy that samples, of the reference model.
        batch_size, max_tokens: of a forward without gradients, at most.
        masks_truncated: a completion without an end is left out (`mask_truncated_completions`).
        limits: of the turns.
        ratios: how vLLM's log-probabilities correct the loss; None where they do not.
        hooks: of the user.
    """

    training: bool
    functions: Sequence[Any]
    state: Any
    generation_config: GenerationConfig | None
    old_logps: bool
    reference: bool
    batch_size: int
    max_tokens: int | None
    masks_truncated: bool
    limits: TurnLimits
    ratios: RatioRule | None = None
    hooks: Hooks = Hooks()


@dataclass
class LocalRollout:
    """One process's part of a rollout batch.

    Attributes:
        request: what was asked for.
        transcripts: one for each row; those of a process without prompts are stand-ins that reach no result.
        terms: that it was made by.
        has_mask: tokens of tools or of an environment may be among those of the completions.
        old_logps, ref_logps: of each transcript's tokens, (T,); None where they are not needed.
        rewards_BF: NaN where a function does not apply; None where the user's `_calculate_rewards` makes them.
        reward_calls: with what the functions logged.
        tool_calls, tool_failures: numbers of them.
        failure: why there is no more of it.
    """

    request: RolloutRequest
    terms: Terms
    transcripts: list[Transcript] = field(default_factory=list)
    has_mask: bool = False
    old_logps: list[torch.Tensor] | None = None
    ref_logps: list[torch.Tensor] | None = None
    rewards_BF: torch.Tensor | None = None
    reward_calls: list[RewardCall] = field(default_factory=list)
    tool_calls: int = 0
    tool_failures: int = 0
    failure: Exception | None = None

    @property
    def counted(self) -> list[Transcript]:
        """The transcripts that reach the rollout batch."""
        return [] if self.request.empty else self.transcripts


@dataclass(frozen=True)
class Parts:
    """What a worker is built from.

    Attributes:
        policy, reference: the models to score with; no reference: the policy's adapters are set aside (`reference_of`).
        reference_of: the context in which the policy is its own reference, without a reference model.
        engine, chat, scorer, rewards: see there.
        environments, toolbox: of a run without environments or tools they are empty.
        images_of: the images of transcripts; None for a model that takes none.
        clock: takes the seconds of the phases.
        sharded: a forward is a collective.
        chunk: completions that a reward function is called with; None: all of this process.
    """

    policy: Callable[[], Any]
    reference: Callable[[], Any | None]
    reference_of: Callable[[], contextlib.AbstractContextManager[Any]]
    engine: Engine
    chat: Chat
    scorer: Scorer
    rewards: RewardRunner
    environments: Environments
    toolbox: Toolbox
    images_of: Callable[[Sequence[Transcript]], RowImages | None]
    clock: PhaseClock
    device: torch.device
    sharded: bool
    chunk: int | None
    end_tokens: frozenset[int]
    filler: int


class RolloutWorker:
    """Makes one process's part of rollout batches.

    Args:
        parts: see there.
        begun: told of the transcripts, once their environments are reset.
    """

    def __init__(self, parts: Parts, begun: Callable[[list[Transcript]], None] = lambda transcripts: None) -> None:
        self.parts, self.begun = parts, begun

    def sample(
        self, request: RolloutRequest, rows: Rows, keys: Sequence[int], numbers: Sequence[int], terms: Terms
    ) -> LocalRollout:
        """This process's transcripts of a rollout batch, with log-probabilities and rewards.

        Args:
            rows: one for each completion.
            keys: of their random numbers.
            numbers: of the rows in the data set; empty for a stream.
        """
        local = LocalRollout(request, terms)
        if not request.empty or terms.hooks.any:
            local.transcripts = self.begin(rows, keys, numbers, terms)
        self.complete(local)
        self.add_logprobs(local)
        self.add_rewards(local)
        return local

    # ---- Prompts --------------------------------------------------------------------------------------------------

    def begin(self, rows: Rows, keys: Sequence[int], numbers: Sequence[int], terms: Terms) -> list[Transcript]:
        """Transcripts of rows before anything is sampled: environments are reset, images are in the messages."""
        transcripts = [
            Transcript(row, key, place, number)
            for place, (row, key, number) in enumerate(zip(rows, keys, numbers or [None] * len(rows)))
        ]
        self.parts.environments.begin(transcripts, terms.limits.seconds)
        for transcript in transcripts:
            transcript.prompt = self.parts.chat.with_images(transcript.prompt, transcript.row)
            if not isinstance(transcript.prompt, str):
                transcript.images = images_in(transcript.prompt)
                transcript.prompt_images = len(transcript.images)
        self.begun(transcripts)
        return transcripts

    def tokenize(self, transcripts: Sequence[Transcript], terms: Terms) -> None:
        """Token ids of the prompts; each different prompt is tokenised once."""
        tokenize = terms.hooks.tokenize or self.parts.chat.tokenize
        firsts, numbers = unique(map(_prompt_name, transcripts))
        prompts = [transcripts[i].prompt for i in firsts]
        ids = tokenize(prompts, [transcripts[i].environment_name for i in firsts])
        if len(ids) != len(prompts):
            raise RolloutError(f"_tokenize_prompts returned {len(ids)} lists of token ids for {len(prompts)} prompts.")
        for transcript, number in zip(transcripts, numbers):
            transcript.prompt_ids = list(ids[number])

    # ---- Turns ----------------------------------------------------------------------------------------------------

    def complete(self, local: LocalRollout) -> None:
        """Completions of the transcripts, by the user's `_generate` or by `converse`."""
        if (generate := local.terms.hooks.generate) is None:
            self.converse(local)
        else:
            take_generated(local, generate([transcript.prompt for transcript in local.transcripts]))

    def converse(self, local: LocalRollout) -> None:
        """The turns: the model writes, tools answer, until no transcript wants a turn."""
        parts, terms, transcripts = self.parts, local.terms, local.transcripts
        if terms.hooks.rollout is not None and transcripts:
            take_rollout(local, terms.hooks.rollout([transcript.prompt for transcript in transcripts]))
        else:
            self.tokenize(transcripts, terms)
            for transcript, (ids, logps) in zip(transcripts, self.generate(local, transcripts)):
                transcript.add_sampled(ids, logps)
        parts.chat.decode(transcripts)
        if not parts.toolbox.has_tools:
            return
        local.has_mask = True
        active = [] if local.request.empty else transcripts
        while self._any(active := parts.toolbox.answer(active, parts.chat, terms.limits)):
            for transcript, (ids, logps) in zip(active, self.generate(local, active)):
                continue_with(transcript, ids, logps, parts.chat, terms.limits)
        local.tool_calls, local.tool_failures = parts.toolbox.take_counts()

    def _any(self, active: Sequence[Transcript]) -> bool:
        return any_process(bool(active), self.parts.device) if self.parts.sharded else bool(active)

    def generate(self, local: LocalRollout, transcripts: list[Transcript]) -> list[Sampled]:
        """One turn of some transcripts; where a forward is a collective every process comes here for every turn."""
        terms, parts, group = local.terms, self.parts, local.request.num_generations
        counted = [] if local.request.empty else transcripts
        with parts.clock.phase("rollout"):
            if terms.hooks.turn is not None and (counted or not parts.sharded):
                sampled = terms.hooks.turn(transcripts)
            else:
                sampled = parts.engine.generate(counted, terms.generation_config, group)
                if local.request.empty:  # they reach no result
                    sampled = [([parts.filler], None) for _ in transcripts]
        if missing := len(transcripts) - len(sampled):
            raise RuntimeError(
                f"No completions were generated for {missing} of {len(transcripts)} prompts. This usually means that "
                "the generation backend failed to return any results; see the generation logs above for the error."
            )
        return sampled

    # ---- Log-probabilities and rewards ----------------------------------------------------------------------------

    def truncated(self, transcript: Transcript) -> bool:
        """Whether the completion has no end."""
        return transcript.ids[-1] not in self.parts.end_tokens

    def add_logprobs(self, local: LocalRollout) -> None:
        """Log-probabilities under the policy that samples and under the reference, only where the run needs them."""
        parts, terms = self.parts, local.terms
        if not (terms.old_logps or terms.reference):
            return
        masked = [terms.masks_truncated and self.truncated(transcript) for transcript in local.transcripts]
        rows, group = self._token_rows(local.transcripts, masked), local.request.num_generations
        if not len(rows):
            if not parts.sharded:
                local.old_logps, local.ref_logps = ([] if terms.old_logps else None), ([] if terms.reference else None)
                return
            filler = torch.tensor([parts.filler] * 2, device=parts.device)
            rows = TokenRows(filler, [1], [1], [])

        def score(model: Any) -> list[torch.Tensor]:
            with parts.scorer.without_gradients(model):
                logps_S = parts.scorer.score_rollout(model, rows, terms.batch_size, terms.max_tokens, group)
            values = iter(logps_S.cpu().split([n for n in rows.completions_B if n]))
            lengths = [] if not local.transcripts else rows.completions_B
            return [next(values) if length else torch.zeros(1) for length in lengths]

        with parts.clock.phase("logps"):
            if terms.old_logps:
                local.old_logps = score(parts.policy())
            if terms.reference and (reference := parts.reference()) is not None:
                local.ref_logps = score(reference)
            elif terms.reference:
                with parts.reference_of():
                    local.ref_logps = score(parts.policy())

    def _token_rows(self, transcripts: Sequence[Transcript], masked: Sequence[bool]) -> TokenRows:
        """The transcripts for a forward; a completion that is masked out has no tokens."""
        tokens = [t.prompt_ids + ([] if out else t.ids) for t, out in zip(transcripts, masked)]
        ids = torch.tensor([token for row in tokens for token in row], dtype=torch.long, device=self.parts.device)
        images = self.parts.images_of(transcripts)
        same = [before.prompt_ids == after.prompt_ids for before, after in zip(transcripts, transcripts[1:])]
        if images is not None:
            same = [tokens and pixels for tokens, pixels in zip(same, images.same)]
        completions = [0 if out else len(t.ids) for t, out in zip(transcripts, masked)]
        return TokenRows(ids, [len(t.prompt_ids) for t in transcripts], completions, same, images)

    def add_rewards(self, local: LocalRollout) -> None:
        """Rewards of each function; none where the user's `_calculate_rewards` makes them, in `join`."""
        if local.terms.hooks.rewards:
            return
        columns = reward_columns(local.counted)
        group = local.request.num_generations
        with self.parts.clock.phase("rewards"):
            local.rewards_BF, local.reward_calls = self.parts.rewards.score(
                *columns,
                functions=local.terms.functions,
                state=local.terms.state,
                environments=environments_of(local.counted),
                first=local.request.prompts.start * group,
                chunk=self.parts.chunk,
            )


def _prompt_name(transcript: Transcript) -> Hashable:
    """What tells the prompts of different transcripts apart."""
    images = () if not transcript.images else (transcript.place if transcript.number is None else transcript.number,)
    shown = json.dumps(transcript.prompt, default=lambda value: type(value).__name__)
    return transcript.environment_name, images, shown


def reward_columns(transcripts: Sequence[Transcript]) -> tuple[list[Any], list[Any], list[Any], list[list[int]]]:
    """What reward functions are called with: rows, prompts, completions, token ids."""
    names = ("row", "prompt", "completion", "ids")
    rows, prompts, completions, ids = ([getattr(t, name) for t in transcripts] for name in names)
    return rows, prompts, completions, ids


def environments_of(transcripts: Sequence[Transcript]) -> list[Any] | None:
    """The environment of each transcript; None without any."""
    environments = [transcript.environment for transcript in transcripts]
    return None if all(environment is None for environment in environments) else environments
