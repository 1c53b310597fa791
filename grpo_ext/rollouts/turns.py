"""The turns of a transcript: their limits in time, length and number, and what the model's next turn adds.

Written as TRL's tool loop has it. A turn is sampled by the worker, between `Toolbox.answer` and `continue_with`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .chat import Chat
from .transcript import Transcript


@dataclass(frozen=True)
class TurnLimits:
    """How far a transcript may go.

    Attributes:
        max_completion_length: tokens of a completion, those of tools and environments among them.
        context: tokens that the model can read, prompt and completion; None: as many as there are.
        max_turns: how often tools answer; None: as often as they are called.
        seconds: that a call of a tool, or of an environment's `reset`, may take; None: any.
    """

    max_completion_length: int
    context: int | None
    max_turns: int | None = None
    seconds: float | None = None

    def waiting(self, transcripts: Sequence[Transcript]) -> list[Transcript]:
        """Those whose calls tools have to answer."""
        most = sys.maxsize if self.max_turns is None else self.max_turns
        return [t for t in transcripts if t.calls and t.turns < most]

    def has_room(self, transcript: Transcript, answer: int) -> bool:
        """Whether an answer of so many tokens fits, and in the context a token of the model after it."""
        completion = len(transcript.ids) + answer
        context = sys.maxsize if self.context is None else self.context
        return completion <= self.max_completion_length and len(transcript.prompt_ids) + completion < context


def context_length(config: Any, takes_images: bool, engine: Any = None) -> int | None:
    """Tokens that sampling can read: the engine's limit where it runs in this process, else the model's.

    Args:
        config: the model's; its text configuration counts where the model takes images.
        engine: TRL's `VLLMGeneration`; None without vLLM.
    """
    if engine is not None and engine.mode == "colocate":
        return engine.llm.llm_engine.model_config.max_model_len
    return getattr(config.text_config if takes_images else config, "max_position_embeddings", None)


def continue_with(
    transcript: Transcript, ids: list[int], logps: list[float | None] | None, chat: Chat, limits: TurnLimits
) -> None:
    """Add a turn of the model after an answer, cut where the completion has its full length.

    A turn of which nothing is left adds no message.

    Args:
        ids: token ids of the turn; logps: what the engine says of each; None where it tells none.
    """
    room = limits.max_completion_length - len(transcript.ids)
    ids, prefix = ids[:room], transcript.prompt_ids + transcript.ids
    if transcript.logps is None:
        logps = None
    elif logps is None:
        logps = [None] * len(ids)
    transcript.add_sampled(ids, None if logps is None else logps[:room])
    transcript.calls = []
    if ids:
        message = chat.parse(ids, prefix, transcript.environment_name)
        transcript.completion = [*transcript.completion, message]
        transcript.calls = chat.calls_of(message)
