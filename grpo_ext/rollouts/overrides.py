"""A user's overrides of TRL's sampling methods while they run, and the worker that calls them.

An override runs where TRL would call it. It may call `super()` with other prompts or tokens, or several times: row i
keeps the key of its place; further rows, and further calls, draw other random numbers. TRL's signatures do not say who
calls them, so `UserCalls` holds the overrides that run; `rollouts.trl_methods` looks there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..batching.prompt_order import RolloutRequest
from ..errors import RolloutError
from ..runtime.collectives import uneven_collectives
from .join import Round
from .local import LocalRollout
from .transcript import Sampled, Transcript
from .trl_shapes import take_generated
from .worker import RolloutWorker


@dataclass
class UserCall:
    """An override that runs."""

    super_calls: Iterator[int] = field(default_factory=itertools.count, init=False)  # numbers its calls of TRL's method


@dataclass
class ScoreCall(UserCall):
    """`_generate_and_score_completions`, for a request; `rounds`: what TRL's method made for it."""

    request: RolloutRequest
    rounds: list[Round] = field(default_factory=list)


@dataclass
class GenerateCall(UserCall):
    """`_generate`, which makes the turns of a rollout."""

    local: LocalRollout


@dataclass
class TurnCall(UserCall):
    """`_generate_single_turn`, which samples for the transcripts of a chunk."""

    local: LocalRollout
    chunk: list[Transcript]


@dataclass
class RewardsCall(UserCall):
    """`_calculate_rewards`, which rewards the completions of a rollout."""

    local: LocalRollout


Call = TypeVar("Call", bound=UserCall)


class UserCalls:
    """The overrides that run now, the innermost last."""

    def __init__(self) -> None:
        self._running: list[UserCall] = []

    @contextmanager
    def running(self, call: Call) -> Iterator[Call]:
        """Inside, an override runs."""
        self._running.append(call)
        try:
            yield call
        finally:
            self._running.pop()

    def innermost(self, kind: type[Call]) -> Call | None:
        """The innermost call of a kind; None outside of one."""
        return next((call for call in reversed(self._running) if isinstance(call, kind)), None)


@dataclass
class MainWorker(RolloutWorker):
    """The worker of the main thread, where users' overrides run."""

    calls: UserCalls = field(default_factory=UserCalls)

    def converse(self, local: LocalRollout) -> None:
        """Run the turns, by the user's `_generate` if there is one."""
        if (generate := local.settings.sampling.hooks.generate) is None:
            super().converse(local)
            return
        with self.calls.running(GenerateCall(local)):
            take_generated(local, generate([transcript.prompt for transcript in local.transcripts]))

    def converse_by_trl(self, local: LocalRollout) -> None:
        """Run the turns for a user's `_generate` that calls TRL's method."""
        super().converse(local)

    def sample_turn(self, local: LocalRollout, transcripts: list[Transcript]) -> list[Sampled]:
        """One turn, chunk by chunk by the user's `_generate_single_turn` if there is one, called as TRL calls it."""
        turn, sharded = local.settings.sampling.hooks.turn, self.settings.sharded
        if turn is None or (sharded and (local.request.empty or not transcripts)):  # joins the forwards of others
            return super().sample_turn(local, transcripts)
        group = local.request.num_generations
        sampled: list[Sampled] = []
        for chunk in [transcripts] if sharded else self.settings.chunks(transcripts, group):
            later = chunk[0].turns > 0
            images = [row.images or None for row in chunk]
            options = {"num_generations": 1, "has_tool_images": any(len(r.images) > r.prompt_images for r in chunk)}
            arguments: tuple[Any, ...] = ([r.prompt_ids + r.ids for r in chunk], images if any(images) else None, {})
            with (
                self.calls.running(TurnCall(local, chunk)),
                uneven_collectives(self.forwards.accelerator, refused_in="_generate_single_turn"),
            ):
                ids, logps = turn(*arguments, **options) if later else turn(*arguments, group)
            if len(ids) != len(chunk):
                raise RolloutError(
                    f"_generate_single_turn returned {len(ids)} completions for {len(chunk)} prompts; return one each."
                )
            values = [None] * len(ids) if logps is None else logps
            sampled += [Sampled(list(tokens), value) for tokens, value in zip(ids, values, strict=True)]
        return sampled
