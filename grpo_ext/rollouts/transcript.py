"""A transcript: one completion as it grows, turn by turn, on the process that samples it.

Differs from TRL, which keeps one list per column (ids, masks, messages, images). Created by the worker, extended by
sampled tokens and by tools, read by `join`. Shapes: N tokens of prompt and completion, C choices of all routers
(forward.routing).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..forward.columns import COLUMNS, EXPERTS, answered, continued, first_tokens
from ..forward.further_rows import FurtherRow
from ..forward.images import images_in
from ..sampling.turn import Context, Returned, Turn

Messages = list[dict[str, Any]]


@dataclass
class Transcript(Context):
    # this completion's own copy of a row of the data set; a `rollout_func` may add columns to it
    row: dict[str, Any] = field(default_factory=dict)
    mask: list[int] = field(default_factory=list)  # of each of `ids`: 1 if the model wrote it, 0 if a tool did
    # what was recorded of `ids`, by name of `forward.columns`; the experts of the prompt too, up to the last sampled
    # token
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    completion: Any = ""  # text, or messages
    environment: Any = None  # the instance that this completion acts in; None without environments
    environment_name: str | None = None  # its name among several factories; None where there is one
    ended: bool = True  # False: a limit cut off its latest turn, so the completion is truncated
    further: Sequence[FurtherRow] = ()  # its rows after the first
    returned: Returned | None = None  # of a `rollout_func`, where it returns rollouts of several rows
    calls: list[Mapping[str, Any]] = field(default_factory=list)  # tool calls of the last message, not yet answered
    tool_calls: int = 0
    tool_failures: int = 0

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
        self.ids, self.ended = [*self.ids, *turn.ids], bool(turn.ended)
        self.mask = [*self.mask, *([1] * new if turn.mask is None else turn.mask)]
        self.prompt_ids = self.prompt_ids if turn.prompt_ids is None else turn.prompt_ids
        self.row.update(turn.fields)
        self.further, self.returned = turn.further, turn.returned

    def add_answer(self, ids: list[int]) -> None:
        self.columns = answered(self.columns, len(ids))
        self.ids, self.mask = [*self.ids, *ids], [*self.mask, *[0] * len(ids)]

    def prompt_alone(self) -> "Transcript":
        """A copy without tokens of the completion, and so without images of tools."""
        return replace(self, ids=[], columns=self.first(0), images=self.images[: self.prompt_images], further=())

    @property
    def rows(self) -> list[FurtherRow]:
        """All of its rows; a first one without tokens is none."""
        first = [] if self.further and not self.further[0].start else [FurtherRow(0, self.prompt_ids)]
        return [*first, *self.further]

    def first(self, tokens: int) -> dict[str, torch.Tensor]:
        """The columns of the first tokens of the completion, of those of its first row or of all.

        Routers choose where no experts were recorded.
        """
        columns, context = dict(self.columns), sum(len(row.context) for row in self.rows)
        if (experts_NC := columns.get(EXPERTS)) is not None:
            missing = (0, 0, 0, context + len(self.ids) - len(experts_NC))
            columns[EXPERTS] = torch.nn.functional.pad(experts_NC, missing, value=COLUMNS[EXPERTS].neutral)
        return first_tokens(columns, context if tokens == len(self.ids) else len(self.prompt_ids), tokens)


def share_prompt_experts(transcripts: Sequence[Transcript], num_generations: int) -> None:
    """Give the completions of a group that have the same prompt the experts recorded first; a pack runs it once.

    Another group with this prompt has its own, because it may be on another process.
    """
    firsts: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
    for transcript in transcripts:
        if (experts_NC := transcript.columns.get(EXPERTS)) is None:
            continue
        prompt, before, experts_NC = transcript.prompt_ids, 0, experts_NC.clone()
        for start, context in transcript.rows:
            of_prompt = experts_NC[before + start : before + start + len(prompt)]
            if context[: len(prompt)] == prompt and len(of_prompt):  # none of further rows where it is masked out
                group = transcript.place // num_generations
                of_prompt.copy_(firsts.setdefault((group, tuple(prompt)), of_prompt.clone()))
            before += len(context)
        transcript.columns[EXPERTS] = experts_NC
