"""The records of a local phase: the user's hooks, terms, the worker's parts, one process's part of a rollout batch.

The worker fills a `LocalRollout`, `join` reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from ..algorithms.importance import RatioRule
from ..batching.prompt_order import RolloutRequest
from ..forward.rows import TokenRows
from ..rewards.calls import RewardCall
from ..rewards.runner import RewardFunctions, RewardRunner
from ..runtime.clock import PhaseClock
from ..runtime.out_of_memory import Halving
from .chat import Chat
from .engine import Engine, EngineSettings
from .environments import Environments
from .images import ImageSource
from .tools import Toolbox, TurnLimits
from .transcript import Transcript


@dataclass(frozen=True)
class Hooks:
    """What a user has overridden of the local phase; None: nothing.

    Attributes:
        tokenize: `_tokenize_prompts`: from prompts, and the names of their environments, to token ids.
        generate, turn: `_generate` and `_generate_single_turn`, as the user wrote them.
        rollout: `rollout_func`, checked: from prompts to its dictionary.
        rewards: `_calculate_rewards`, called in `join` in the place of the worker's rewards.
        score: `_generate_and_score_completions`, of this process's rows; returns TRL's padded dictionary.
    """

    tokenize: Callable[[list[Any], list[str | None]], list[list[int]]] | None = None
    generate: Callable[..., Any] | None = None
    turn: Callable[..., Any] | None = None
    rollout: Callable[[list[Any]], dict[str, Any]] | None = None
    rewards: Callable[..., torch.Tensor] | None = None
    score: Callable[..., dict[str, Any]] | None = None

    @property
    def any(self) -> bool:
        """Whether a process without prompts has to take part, because a hook may hold collectives."""
        return any(vars(self).values())


@dataclass(frozen=True)
class Terms:
    """What is read of the trainer at the start of a rollout batch, because callbacks may change it.

    Attributes:
        training: False in an evaluation.
        seed: of the random numbers.
        rewards: the reward functions; weights_F: their weights, on the CPU.
        recorders: the user's own `_log_metric` and `_log_completion_extra`, by keyword; none where they are TRL's.
        pending: TRL's records of what was logged outside a call of a reward function, by name and by column.
        state: of the Trainer; an argument of reward functions.
        generation_config: transformers' settings; None with vLLM.
        old_logps, reference: log-probabilities of the policy that samples, of the reference model, are needed.
        batch_size, max_tokens: limits of a forward without gradients.
        ends: a completion that ends in none of these tokens is truncated.
        masks_truncated: a truncated completion is masked out (`mask_truncated_completions`).
        limits: of the turns.
        ratios: how vLLM's log-probabilities correct the loss; None where they do not.
        hooks: methods and functions of the user.
    """

    training: bool
    seed: int
    rewards: RewardFunctions
    weights_F: torch.Tensor
    recorders: Mapping[str, Any]
    pending: tuple[MutableMapping[str, list[float]], MutableMapping[str, list[Any]]]
    state: Any
    generation_config: GenerationConfig | None
    old_logps: bool
    reference: bool
    batch_size: int
    max_tokens: int | None
    ends: Container[int]
    masks_truncated: bool
    limits: TurnLimits
    ratios: RatioRule | None = None
    hooks: Hooks = Hooks()

    def masked(self, transcripts: Sequence[Transcript]) -> list[bool]:
        """Which completions are masked out."""
        return [self.masks_truncated and transcript.ids[-1] not in self.ends for transcript in transcripts]


@dataclass
class LocalRollout:
    """One process's part of a rollout batch.

    Attributes:
        request: the prompts of this process.
        transcripts: one for each row; those of a process without prompts are stand-ins that reach no result.
        terms: of the rollout batch.
        extra_fields: what a `rollout_func` returned beside TRL's lists.
        has_mask: tokens of tools or of an environment may be among those of the completions.
        old_logps, ref_logps: of each transcript's tokens, (T,); None where they are not needed.
        rewards_BF: NaN where a function does not apply; None where the user's `_calculate_rewards` makes them.
        reward_calls: with what the functions logged.
        failure: the error that ended the local phase.
    """

    request: RolloutRequest
    terms: Terms
    transcripts: list[Transcript] = field(default_factory=list)
    has_mask: bool = False
    extra_fields: dict[str, Any] = field(default_factory=dict)
    old_logps: list[torch.Tensor] | None = None
    ref_logps: list[torch.Tensor] | None = None
    rewards_BF: torch.Tensor | None = None
    reward_calls: list[RewardCall] = field(default_factory=list)
    failure: Exception | None = None

    @property
    def counted(self) -> list[Transcript]:
        """The transcripts that reach the rollout batch."""
        return [] if self.request.empty else self.transcripts

    @property
    def first(self) -> int:
        """Place of the first of these completions in the rollout batch, over all processes."""
        return self.request.prompts.start * self.request.num_generations


@dataclass(frozen=True)
class Parts:
    """What a worker is built from.

    Attributes:
        policy, reference: give the models that score; None from `reference`: the policy inside `as_reference`.
        as_reference: a context in which the policy is the reference: its adapters are disabled.
        logps: log-probabilities (S,) of the completion tokens of rows under a model.
        engine, chat, environments, toolbox, rewards, images, settings: each documented by its class.
        memory: the number of completions that fit into one `generate`.
        clock: adds up the seconds of the phases.
    """

    policy: Callable[[], Any]
    reference: Callable[[], Any | None]
    as_reference: Callable[[], contextlib.AbstractContextManager[Any]]
    logps: Callable[[Any, TokenRows, Terms, int], torch.Tensor]
    engine: Engine
    chat: Chat
    environments: Environments
    toolbox: Toolbox
    rewards: RewardRunner
    images: ImageSource
    memory: Halving
    clock: PhaseClock
    settings: EngineSettings

    @property
    def shards_vision(self) -> bool:
        """Whether forwards with and without images are different collectives."""
        return self.settings.sharded and self.images.prepare is not None
