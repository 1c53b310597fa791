"""The records of a local phase: the user's hooks, the terms of a rollout batch, one process's part of it.

The worker fills a `LocalRollout`, `join` reads it.
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
from ..replay import Replay
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
class Terms:
    """What is read from the trainer at the start of a rollout batch, because users and callbacks may change it.

    Attributes:
        training: False in an evaluation.
        rewards: the reward functions; weights_F: their weights, on the CPU; rule: from rewards to advantages.
        recorders: the user's own `_log_metric` and `_log_completion_extra`, by keyword; none where they are TRL's.
        metrics, table: TRL's records: log values of the mode, and the table of completions.
        pending: TRL's records of what was logged outside a call of a reward function, by name and by column.
        state: of the Trainer; an argument of reward functions.
        generation_config: transformers' settings; None with vLLM.
        old_logps, reference: log-probabilities of the policy that samples, of the reference model, are needed.
        unchecked: vLLM's log-probabilities are still to be compared with the policy's.
        batch_size, max_tokens: limits of a forward without gradients.
        chat, toolbox: the tools that prompts show; those that are called, and the environments.
        ends: a completion of which only the ids are known, and that ends in none of these tokens, is truncated.
        masks_truncated: a truncated completion is masked out (`mask_truncated_completions`).
        logs_images: the table of completions shows images (`log_multimodal`).
        record_experts: the forward of the policy's log-probabilities records the experts, because the sampler does not.
        truncating: the filters that leave out tokens, with their settings.
        ratios: how vLLM's log-probabilities correct the loss; None where they do not.
    """

    training: bool
    num_generations: int
    seed: int
    rewards: RewardFunctions
    weights_F: torch.Tensor
    rule: AdvantageRule
    recorders: Mapping[str, Any]
    metrics: MutableMapping[str, list[float]]
    table: dict[str, Any]
    pending: tuple[MutableMapping[str, list[float]], MutableMapping[str, list[Any]]]
    state: Any
    generation_config: GenerationConfig | None
    old_logps: bool
    reference: bool
    unchecked: bool
    batch_size: int
    max_tokens: int | None
    chat: Chat
    toolbox: Toolbox
    ends: Container[int]
    masks_truncated: bool
    logs_images: bool
    limits: TurnLimits
    replay: Replay
    record_experts: bool
    truncating: Mapping[str, Any]
    ratios: RatioRule | None
    hooks: Hooks

    @property
    def scores_policy(self) -> bool:
        """Whether the log-probabilities of the policy are computed."""
        return self.old_logps or self.record_experts or (self.unchecked and not self.hooks.sampling)

    def masked(self, transcripts: Sequence[Transcript]) -> list[bool]:
        """Which completions are masked out."""
        return [self.masks_truncated and not transcript.ended for transcript in transcripts]


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
        known_ends: by ids, whether a row ended that a user's override had from TRL's method.
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
    known_ends: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a row has ended of which a user's function, or a server, returned the ids alone."""
        return self.known_ends.get(tuple(ids), bool(ids) and ids[-1] in self.terms.ends)

    @property
    def real_transcripts(self) -> list[Transcript]:
        """The transcripts that reach the rollout batch."""
        return [] if self.request.empty else self.transcripts

    @property
    def first(self) -> int:
        """Place of the first of these completions in the rollout batch, over all processes."""
        return self.request.prompts.start * self.request.num_generations
