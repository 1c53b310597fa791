"""The records of a local phase: what it reads of the trainer, and one process's part of a rollout batch.

`rollouts.settings` fills the settings, the worker a `LocalRollout`, which `join` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from ..algorithms.advantages import AdvantageRule
from ..algorithms.losses import RatioRule
from ..batching.prompt_order import RolloutRequest
from ..config import Replay
from ..rewards.runner import RewardFunctions
from ..rewards.worker import RewardCall
from .chat import Chat
from .tools import Toolbox, TurnLimits
from .transcript import Transcript


@dataclass(frozen=True)
class Hooks:
    """The user's overrides of TRL's sampling; None: TRL's method.

    Attributes:
        tokenize: `_tokenize_prompts`: from prompts, and the names of their environments, to token ids.
        generate, turn: `_generate` and `_generate_single_turn`, as the user wrote them.
        rollout: `rollout_func`, checked: from prompts to its dictionary.
        rewards: `_calculate_rewards`, called between `exchange` and `join`, instead of the worker's reward functions.
        score: `_generate_and_score_completions`, of this process's rows; returns TRL's padded dictionary.
    """

    tokenize: Callable[[list[Any], list[str | None]], list[list[int]]] | None = None
    generate: Callable[..., Any] | None = None
    turn: Callable[..., Any] | None = None
    rollout: Callable[[list[Any]], dict[str, Any]] | None = None
    rewards: Callable[..., torch.Tensor] | None = None
    score: Callable[..., dict[str, Any]] | None = None

    @property
    def sampling(self) -> bool:
        """Whether completions, or their log-probabilities, may be the user's own."""
        return any((self.generate, self.turn, self.rollout, self.score))

    @property
    def need_all_processes(self) -> bool:
        """Whether a process without prompts has to take part, because a hook may hold collectives."""
        return any(vars(self).values())


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are sampled.

    Attributes:
        training: False in an evaluation.
        generation_config: transformers' settings; None with vLLM.
        chat, toolbox: the tools that prompts show; the tools that are called, and the environments.
        ends: a completion known by its ids alone is truncated unless it ends in one of these tokens.
        masks_truncated: a truncated completion is masked out (`mask_truncated_completions`).
        truncating: the filters that leave out tokens, with their settings.
    """

    training: bool
    num_generations: int
    seed: int
    generation_config: GenerationConfig | None
    chat: Chat
    toolbox: Toolbox
    limits: TurnLimits
    ends: Container[int]
    masks_truncated: bool
    replay: Replay
    truncating: Mapping[str, Any]
    hooks: Hooks

    def masked(self, transcripts: Sequence[Transcript]) -> list[bool]:
        """Which completions are masked out."""
        return [self.masks_truncated and not transcript.ended for transcript in transcripts]


@dataclass(frozen=True)
class LogprobSettings:
    """Which log-probabilities are computed in the local phase.

    Attributes:
        of_policy: those of the policy that samples, for training (`trained_on`) or to check vLLM's.
        of_reference: those of the reference model.
        trained_on: the policy's are columns of the rollout batch.
        record_experts: the policy's forward records the experts, because the sampler does not.
        batch_size, max_tokens: limits of a forward without gradients.
        ratios: how vLLM's log-probabilities correct the loss; None where they do not.
    """

    of_policy: bool
    of_reference: bool
    trained_on: bool
    record_experts: bool
    batch_size: int
    max_tokens: int | None
    ratios: RatioRule | None


@dataclass(frozen=True)
class PendingLogs:
    """TRL's records of what was logged outside a call of a reward function: by metric, and by column of the table."""

    metrics: MutableMapping[str, list[float]]
    columns: MutableMapping[str, list[Any]]


@dataclass(frozen=True)
class RewardSettings:
    """How completions are rewarded.

    Attributes:
        weights_F: the weights of the functions, on the CPU; rule: from rewards to advantages.
        recorders: the user's own `_log_metric` and `_log_completion_extra`, by keyword; none where they are TRL's.
        state: of the Trainer; an argument of reward functions.
    """

    functions: RewardFunctions
    weights_F: torch.Tensor
    rule: AdvantageRule
    recorders: Mapping[str, Any]
    pending: PendingLogs
    state: Any


@dataclass(frozen=True)
class RolloutSettings:
    """What is read from the trainer when a rollout batch begins, because users and callbacks may change it."""

    sampling: SamplingSettings
    logprobs: LogprobSettings
    rewards: RewardSettings


@dataclass
class LocalRollout:
    """What this process has sampled and scored of a rollout batch.

    Attributes:
        request: the prompts of this process.
        transcripts: one for each row; those of a process without prompts are stand-ins that reach no result.
        has_mask: completions may contain tokens of tools or of an environment.
        extra_fields: what a `rollout_func` returned beside TRL's lists.
        old_logps, ref_logps: of each transcript's tokens, (T,); None where they are not needed.
        rewards_BF: NaN where a function does not apply; None where the user's `_calculate_rewards` makes them.
        reward_calls: a record of each call of a reward function, with what it logged.
        failure: the error that ended the local phase.
        known_ends: whether a row ended, by its ids, for rows that a user's override got from TRL's method.
    """

    request: RolloutRequest
    settings: RolloutSettings
    transcripts: list[Transcript] = field(default_factory=list)
    has_mask: bool = False
    extra_fields: dict[str, Any] = field(default_factory=dict)
    old_logps: list[torch.Tensor] | None = None
    ref_logps: list[torch.Tensor] | None = None
    rewards_BF: torch.Tensor | None = None
    reward_calls: list[RewardCall] = field(default_factory=list)
    failure: Exception | None = None
    known_ends: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a row has ended, where a user's function or a server returned its ids alone."""
        return self.known_ends.get(tuple(ids), bool(ids) and ids[-1] in self.settings.sampling.ends)

    @property
    def real_transcripts(self) -> list[Transcript]:
        """The transcripts that reach the rollout batch."""
        return [] if self.request.empty else self.transcripts

    @property
    def first(self) -> int:
        """Place of the first of these completions in the rollout batch, over all processes."""
        return self.request.prompts.start * self.request.num_generations
