"""A user's overrides of `_generate` and `_generate_single_turn`, and TRL's methods, which they may call by `super()`.

An override runs where TRL would call it. It may call `super()` with other prompts or tokens, or several times: row i
keeps the key of its place; further rows, and further calls, draw other random numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ..algorithms.keyed_random import mix
from ..batching.prompt_order import StepRows
from ..runtime.attributes import assigned
from ..runtime.collectives import uneven_gathers
from .chat import images_in
from .engine import Sampled
from .keyed import BEYOND, request_keys
from .local import LocalRollout, Parts, Terms
from .transcript import Transcript
from .trl_shapes import take_generated, trl_generated
from .worker import RolloutWorker


class OverriddenWorker(RolloutWorker):
    """The worker of the main thread, where users' overrides run.

    Args:
        begun: called with the transcripts, once their environments are reset.

    Attributes:
        active_rollout: the rollout whose turns a user's `_generate` runs; None outside of it.
        active_chunk: the transcripts that a user's `_generate_single_turn` samples for; None outside of it.
    """

    def __init__(self, parts: Parts, accelerator: Accelerator, begun: Callable[[list[Transcript]], None]) -> None:
        super().__init__(parts)
        self.accelerator, self.begun = accelerator, begun
        self.active_rollout: LocalRollout | None = None
        self.active_chunk: list[Transcript] | None = None
        self._calls = 0  # of `super()`, by the override that runs

    def begin(self, rows: StepRows, terms: Terms, repeat: int) -> list[Transcript]:
        """See `RolloutWorker`."""
        transcripts = super().begin(rows, terms, repeat)
        self.begun(transcripts)
        return transcripts

    def converse(self, local: LocalRollout) -> None:
        """Run the turns, by the user's `_generate` if there is one."""
        if (generate := local.terms.hooks.generate) is None:
            super().converse(local)
            return
        with assigned(self, active_rollout=local, _calls=0):
            take_generated(local, generate([transcript.prompt for transcript in local.transcripts]))

    def generate_for_trl(self, prompts: Sequence[Any]) -> tuple[Any, ...]:
        """`super()._generate` of an override: the turns of any list of prompts; TRL's tuple of eight."""
        local = self.active_rollout
        assert local is not None
        known, terms, transcripts = local.transcripts, local.terms, []
        keys = request_keys(local.request, len(prompts), terms.seed, terms.training, self._next_call())
        for place, (prompt, key) in enumerate(zip(prompts, keys)):
            row = known[place] if place < len(known) else Transcript({"prompt": prompt}, key, place)
            images = [] if isinstance(prompt, str) else images_in(prompt)
            shown: Any = {"images": images, "prompt_images": len(images)}
            counts: Any = {"tool_calls": 0, "tool_failures": 0}
            transcripts.append(dataclasses.replace(row, key=key, prompt=prompt, **shown, **counts))
        part = LocalRollout(local.request, terms, transcripts)
        super().converse(part)
        for place, row in enumerate(transcripts if known else ()):
            known[place % len(known)].tool_calls += row.tool_calls
            known[place % len(known)].tool_failures += row.tool_failures
        return trl_generated(part)

    def sample_turn(self, local: LocalRollout, transcripts: list[Transcript]) -> list[Sampled]:
        """One turn, chunk by chunk by the user's `_generate_single_turn` if there is one, called as TRL calls it."""
        turn, sharded = local.terms.hooks.turn, self.parts.settings.sharded
        if turn is None or (sharded and (local.request.empty or not transcripts)):  # joins the forwards of others
            return super().sample_turn(local, transcripts)
        group = local.request.num_generations
        sampled: dict[int, Sampled] = {}
        for chunk in [transcripts] if sharded else self.parts.settings.chunks(transcripts, group):
            later = chunk[0].turns > 0
            images = [row.images or None for row in chunk]
            options = {"num_generations": 1, "has_tool_images": any(len(r.images) > r.prompt_images for r in chunk)}
            arguments: tuple[Any, ...] = ([r.prompt_ids + r.ids for r in chunk], images if any(images) else None, {})
            with (
                assigned(self, active_chunk=chunk, _calls=0),
                uneven_gathers(self.accelerator, refused_in="_generate_single_turn"),
            ):
                ids, logps = turn(*arguments, **options) if later else turn(*arguments, group)
            values = [None] * len(ids) if logps is None else logps
            sampled |= {id(r): (list(tokens), value) for r, tokens, value in zip(chunk, ids, values)}
        return [sampled[id(row)] for row in transcripts if id(row) in sampled]

    def turn_for_trl(
        self, prompt_ids: Sequence[Sequence[int]], images: Sequence[Any] | None, config: Any, num_generations: int
    ) -> tuple[list[list[int]], Any]:
        """`super()._generate_single_turn` of an override: new tokens for rows of the chunk, after any tokens."""
        chunk, call = self.active_chunk, self._next_call()
        assert chunk is not None
        rows = []
        for place, ids in enumerate(prompt_ids):
            row = chunk[min(place, len(chunk) - 1)]
            key, cut = row.key, len(ids) - len(row.ids)
            if place >= len(chunk) or call:  # a row that the override has added, or a further call
                key = int(mix(torch.tensor(key), BEYOND + place * (place >= len(chunk)) + (call << 20)))
            shown = row.images if images is None else list(images[place] or ())
            tokens: Any = {"prompt_ids": list(ids[:cut]), "ids": list(ids[cut:])}
            rows.append(dataclasses.replace(row, key=key, images=shown, **tokens))
        sampled = self.parts.engine.generate(rows, config, num_generations)
        logps = [values for _, values in sampled]
        return [ids for ids, _ in sampled], None if any(values is None for values in logps) else logps

    def _next_call(self) -> int:
        """The number of the override's next call of `super()`, from 0."""
        self._calls += 1
        return self._calls - 1
