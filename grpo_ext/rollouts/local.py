"""The records of a local phase: what it reads of the trainer, and one process's part of a rollout batch.

`rollouts.settings` fills the settings, the worker a `LocalRollout`, which `join` reads.
"""

import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..algorithms.advantages import AdvantageRule
from ..algorithms.losses import RatioRule
from ..batching.prompt_order import RolloutRequest
from ..batching.sizes import ChunkSizes
from ..config import Replay
from ..rewards.runner import RewardFunctions
from ..rewards.worker import RewardCall
from ..sampling.sampler import Sampler
from .chat import Chat
from .tools import Toolbox, TurnLimits
from .transcript import Transcript


@dataclass(frozen=True)
class RolloutSettings:
    """What is read from the trainer when a rollout batch begins, because users and callbacks may change it."""

    training: bool  # False in an evaluation
    num_generations: int
    sizes: ChunkSizes  # of reward and `generate` calls
    seed: int
    sampler: Sampler
    chat: Chat
    toolbox: Toolbox
    limits: TurnLimits
    masks_truncated: bool  # `mask_truncated_completions`
    replay: Replay
    # the user's `_calculate_rewards`, called between `exchange` and `join` instead of the worker's reward functions
    own_rewards: Callable[..., torch.Tensor] | None
    # the user's `_generate_and_score_completions`: from this process's rows to TRL's padded dictionary
    own_scoring: Callable[..., dict[str, Any]] | None

    # Log-probabilities: keys of `forward.columns.MODEL_LOGPS`; "policy" for training (`trained_on`), to check vLLM's,
    # or to record experts
    scored_by: tuple[str, ...]
    trained_on: bool  # the policy's are columns of the rollout batch
    record_experts: bool  # by the policy's forward, because the sampler does not
    batch_size: int  # of a forward without gradients, as `max_tokens`
    max_tokens: int | None
    ratios: RatioRule | None  # how vLLM's log-probabilities correct the loss; None where they do not

    # Rewards
    functions: RewardFunctions
    rule: AdvantageRule
    log_extra: Callable[..., None] | None  # the user's own `_log_completion_extra`
    # TRL's records of what was logged outside a call of a reward function: by metric, by column of the table
    pending_metrics: MutableMapping[str, list[float]]
    pending_columns: MutableMapping[str, list[Any]]
    state: Any  # of the Trainer; an argument of reward functions

    @property
    def by_user(self) -> bool:
        """Whether completions, or their log-probabilities, may be the user's own."""
        return self.sampler.by_user is not None or self.own_scoring is not None

    def masked(self, transcripts: Sequence[Transcript]) -> list[bool]:
        return [self.masks_truncated and not transcript.ended for transcript in transcripts]

    def shown(self, transcripts: Sequence[Transcript]) -> list[Transcript]:
        """The transcripts, with the prompt alone where the completion is masked out."""
        return [t.prompt_alone() if out else t for t, out in zip(transcripts, self.masked(transcripts), strict=True)]


@dataclass
class LocalRollout:
    """What this process has sampled and scored of a rollout batch."""

    request: RolloutRequest  # the prompts of this process
    settings: RolloutSettings
    # one for each row; those of a process without prompts are stand-ins that reach no result
    transcripts: list[Transcript] = field(default_factory=list)
    has_mask: bool = False  # completions may contain tokens of tools or of an environment
    # NaN where a function does not apply; None where the user's `_calculate_rewards` makes them
    rewards_BF: torch.Tensor | None = None
    reward_calls: list[RewardCall] = field(default_factory=list)
    failure: Exception | None = None  # that ended the local phase
    # whether a row ended, by its ids, for rows that a `rollout_func` got from the trainer's `generate`
    known_ends: dict[tuple[int, ...], bool] = field(default_factory=dict)
    generate_calls: Iterator[int] = field(default_factory=itertools.count)  # numbers the calls of `generate`

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a row has ended, where a user's function or a server returned only its ids."""
        return self.known_ends.get(tuple(ids), bool(ids) and ids[-1] in self.settings.sampler.ends)

    @property
    def real_transcripts(self) -> list[Transcript]:
        return [] if self.request.stands_in else self.transcripts

    @property
    def first(self) -> int:
        """Place of the first of these completions in the rollout batch, over all processes."""
        return self.request.prompts.start * self.request.num_generations
