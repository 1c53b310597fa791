"""A transcript: one completion as it grows, turn by turn, on the process that samples it.

Differs from TRL, which keeps one list per column (ids, masks, messages, images). Created by the worker, extended by
sampled tokens and by tools, read by `join`. Shapes: T tokens, K kept ids of all tokens, N tokens of prompt and
completion, C choices of all routers (forward.routing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..forward.images import images_in
from ..forward.routing import BY_ROUTER
from ..forward.sampling_masks import KeptIds

Messages = list[dict[str, Any]]


class TokenRecord(NamedTuple):
    """The records of a completion's tokens, on the CPU; neutral for tokens of tools and environments."""

    logps_T: torch.Tensor  # log-probability of each token, after every filter
    mass_T: torch.Tensor  # the share of the probability that the filters had kept
    counts_T: torch.Tensor  # with `ids_K`: of `KeptIds`; no ids without replay
    ids_K: torch.Tensor

    @classmethod
    def neutral(cls, tokens: int) -> TokenRecord:
        return cls(torch.zeros(tokens), torch.ones(tokens), *KeptIds.neutral(tokens))

    @classmethod
    def of_kept(cls, kept_ids: Sequence[Sequence[int]], logps: Sequence[float | None] | None) -> TokenRecord:
        """Records from the kept ids and log-probabilities of a `rollout_func` or of vLLM; NaN where it gives none."""
        tokens = len(kept_ids)
        known = [math.nan if value is None else value for value in logps or [None] * tokens]
        counts = torch.tensor([len(ids) for ids in kept_ids], dtype=torch.int32)
        ids_K = torch.tensor([token for ids in kept_ids for token in ids], dtype=torch.int32)
        return cls(torch.tensor(known), torch.full((tokens,), math.nan), counts, ids_K)

    @classmethod
    def joined(cls, parts: Sequence[TokenRecord]) -> TokenRecord:
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    @property
    def kept(self) -> KeptIds:
        return KeptIds(self.counts_T, self.ids_K)

    def first(self, tokens: int) -> TokenRecord:
        return TokenRecord(self.logps_T[:tokens], self.mass_T[:tokens], *self.kept.first(tokens))


@dataclass(frozen=True)
class Sampled:
    ids: list[int]  # new tokens
    logps: list[float | None] | None = None  # of each, from an engine that returns them
    record: TokenRecord | None = field(default=None, compare=False)  # of each, from an engine that makes one
    # the experts of the tokens before and of these, as the engine recorded them (`routing_replay`)
    experts_NC: torch.Tensor | None = field(default=None, compare=False)
    ended: bool | None = None  # False: a limit of length or time cut it off; None: only its last token can tell

    def first(self, tokens: int) -> Sampled:
        logps = None if self.logps is None else self.logps[:tokens]
        record = None if self.record is None else self.record.first(tokens)
        cut = max(len(self.ids) - tokens, 0)
        experts = None if self.experts_NC is None else self.experts_NC[: len(self.experts_NC) - cut]
        return Sampled(self.ids[:tokens], logps, record, experts, self.ended and not cut)


@dataclass
class Transcript:
    row: dict[str, Any]  # this completion's own copy of a row of the data set; a `rollout_func` may add columns to it
    key: int  # of the random numbers of its tokens (algorithms.keyed_random), int64
    place: int = 0  # among the completions of this process
    number: int | None = None  # transcripts with one number have the same prompt and images; None: images of its own
    prompt: Any = ""  # text, or messages: after the environment's reset, with images in their content
    prompt_ids: list[int] = field(default_factory=list)  # without padding
    ids: list[int] = field(default_factory=list)  # of the completion so far
    mask: list[int] = field(default_factory=list)  # of each of `ids`: 1 if the model wrote it, 0 if a tool did
    # of each of `ids` by the engine that sampled (None: unknown), 0.0 for tokens of tools; None: it returns none
    logps: list[float | None] | None = None
    record: TokenRecord | None = None  # of each of `ids`; None where an engine, or a user's function, made none
    # the experts of prompt and completion up to the last sampled token; None where they are not replayed, or recorded
    # with the log-probabilities
    experts_NC: torch.Tensor | None = None
    completion: Any = ""  # text, or messages
    images: list[Any] = field(default_factory=list)  # of the prompt, then those shown by tools
    prompt_images: int = 0  # how many of `images` are the prompt's
    environment: Any = None  # the instance that this completion acts in; None without environments
    environment_name: str | None = None  # its name among several factories; None where there is one
    ended: bool = True  # False: a limit cut off its latest turn, so the completion is truncated
    calls: list[Mapping[str, Any]] = field(default_factory=list)  # tool calls of the last message, not yet answered
    turns: int = 0  # how often tools have answered
    tool_calls: int = 0
    tool_failures: int = 0

    @property
    def all_ids(self) -> list[int]:
        return self.prompt_ids + self.ids

    def set_prompt(self, prompt: Any) -> None:
        self.prompt, self.images = prompt, images_in(prompt)
        self.prompt_images = len(self.images)
        if self.environment is not None:
            self.number = None

    def show(self, images: Sequence[Any]) -> None:
        if images:
            self.images, self.number = [*self.images, *images], None

    def add_sampled(self, turn: Sampled) -> None:
        if not self.ids:
            self.record = turn.record
        elif self.record is not None:
            self.record = None if turn.record is None else TokenRecord.joined([self.record, turn.record])
        self.experts_NC, self.ended = _continued(self.experts_NC, turn.experts_NC), bool(turn.ended)
        self.ids = [*self.ids, *turn.ids]
        self.mask = [*self.mask, *[1] * len(turn.ids)]
        if turn.logps is not None:
            self.logps = [*(self.logps or ()), *turn.logps]

    def add_answer(self, ids: list[int]) -> None:
        self.ids = [*self.ids, *ids]
        self.mask = [*self.mask, *[0] * len(ids)]
        if self.logps is not None:
            self.logps = [*self.logps, *[0.0] * len(ids)]
        if self.record is not None:
            self.record = TokenRecord.joined([self.record, TokenRecord.neutral(len(ids))])

    def prompt_alone(self) -> Transcript:
        """A copy without tokens of the completion, and so without images of tools."""
        return replace(self, ids=[], images=self.images[: self.prompt_images])

    @property
    def experts(self) -> torch.Tensor | None:
        """The experts of prompt and completion; `BY_ROUTER` for what followed the last token that was sampled."""
        if self.experts_NC is None:
            return None
        missing = len(self.all_ids) - len(self.experts_NC)  # below 0 if the completion is left out
        return torch.nn.functional.pad(self.experts_NC, (0, 0, 0, missing), value=BY_ROUTER)


def images_shown(transcripts: Sequence[Transcript]) -> list[list[Any] | None] | None:
    """The images of each transcript, None for one without; None if no transcript has any."""
    images = [transcript.images or None for transcript in transcripts]
    return images if any(images) else None


def share_prompt_experts(transcripts: Sequence[Transcript], num_generations: int) -> None:
    """Give the completions of a group that have the same prompt the experts recorded first; a pack runs it once.

    Another group with this prompt has its own, because it may be on another process.
    """
    firsts: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
    for transcript in transcripts:
        if (experts_NC := transcript.experts_NC) is not None:
            length, group = len(transcript.prompt_ids), transcript.place // num_generations
            first = firsts.setdefault((group, tuple(transcript.prompt_ids)), experts_NC[:length])
            transcript.experts_NC = torch.cat([first, experts_NC[length:]])


def _continued(before_NC: torch.Tensor | None, turn_NC: torch.Tensor | None) -> torch.Tensor | None:
    """The experts after a turn, which ran all earlier tokens again; what was recorded first stays."""
    if before_NC is None or turn_NC is None:
        return turn_NC
    ran = len(before_NC) - 1  # all but the last token
    return torch.cat([before_NC[:ran], turn_NC[ran:]])
