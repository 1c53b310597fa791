"""A transcript: one completion as it grows, turn by turn, on the process that samples it.

Differs from TRL, which keeps one list per column (ids, masks, messages, images). Created by the worker, extended by
sampled tokens and by tools, read by `join`. Shapes: N tokens of prompt and completion, C choices of all routers
(forward.routing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..forward.columns import (
    COLUMNS,
    EXPERTS,
    KEPT_COUNTS,
    KEPT_IDS,
    KEPT_MASS,
    SAMPLER_LOGPS,
    SAMPLING_LOGPS,
    answered,
    continued,
    first_tokens,
)
from ..forward.images import images_in

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Turn:
    """New tokens of one completion, and what sampled them recorded of each."""

    ids: list[int]
    # by name of `forward.columns`, on the CPU; the experts are those of the tokens before these too
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    ended: bool | None = None  # False: a limit of length or time cut it off; None: only its last token can tell

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        logps: Sequence[float | None] | None,  # None: unknown
        kept_ids: Sequence[Sequence[int]] | None = None,  # those that each token was sampled from
        ended: bool | None = None,
    ) -> Turn:
        """A turn from the lists of a user's function or of vLLM."""
        columns: dict[str, torch.Tensor] = {}
        known = torch.tensor([math.nan if value is None else value for value in logps or [None] * len(ids)])
        if logps is not None:
            columns[SAMPLING_LOGPS] = known
        if kept_ids is not None:
            columns |= {SAMPLER_LOGPS: known, KEPT_MASS: torch.full_like(known, math.nan)}
            columns[KEPT_COUNTS] = torch.tensor([len(among) for among in kept_ids], dtype=torch.int32)
            columns[KEPT_IDS] = torch.tensor([token for among in kept_ids for token in among], dtype=torch.int32)
        return cls(list(ids), columns, ended)

    @property
    def logps(self) -> list[float | None] | None:
        """The engine's log-probabilities, as TRL's methods return them."""
        values = self.columns.get(SAMPLING_LOGPS)
        return None if values is None else [None if math.isnan(value) else value for value in values.tolist()]

    def first(self, tokens: int) -> Turn:
        if tokens >= len(self.ids):
            return self
        context = len(self.columns[EXPERTS]) - len(self.ids) if EXPERTS in self.columns else 0
        return Turn(self.ids[:tokens], first_tokens(self.columns, context, tokens), self.ended and False)


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
    # what was recorded of `ids`, by name of `forward.columns`; the experts of the prompt too, up to the last sampled
    # token
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
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

    def add_turn(self, turn: Turn) -> None:
        new = len(turn.ids)
        self.columns = continued(self.columns, turn.columns, new) if self.ids else dict(turn.columns)
        self.ids, self.mask, self.ended = [*self.ids, *turn.ids], [*self.mask, *[1] * new], bool(turn.ended)

    def add_answer(self, ids: list[int]) -> None:
        self.columns = answered(self.columns, len(ids))
        self.ids, self.mask = [*self.ids, *ids], [*self.mask, *[0] * len(ids)]

    def prompt_alone(self) -> Transcript:
        """A copy without tokens of the completion, and so without images of tools."""
        return replace(self, ids=[], columns=self.first(0), images=self.images[: self.prompt_images])

    def first(self, tokens: int) -> dict[str, torch.Tensor]:
        """The columns of the first tokens of the completion; routers choose where no experts were recorded."""
        columns = dict(self.columns)
        if (experts_NC := columns.get(EXPERTS)) is not None:
            missing = (0, 0, 0, len(self.all_ids) - len(experts_NC))
            columns[EXPERTS] = torch.nn.functional.pad(experts_NC, missing, value=COLUMNS[EXPERTS].neutral)
        return first_tokens(columns, len(self.prompt_ids), tokens)


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
        if (experts_NC := transcript.columns.get(EXPERTS)) is not None:
            length, group = len(transcript.prompt_ids), transcript.place // num_generations
            first = firsts.setdefault((group, tuple(transcript.prompt_ids)), experts_NC[:length])
            transcript.columns[EXPERTS] = torch.cat([first, experts_NC[length:]])
