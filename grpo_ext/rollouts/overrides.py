"""A user's overrides of `_generate` and `_generate_single_turn`, and TRL's methods, which they may call by `super()`.

An override runs where TRL would call it. It may call `super()` with other prompts or tokens, or several times: row i
keeps the key of its place; further rows, and further calls, draw other random numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..algorithms.keyed_random import mix
from ..errors import RolloutError
from ..runtime.attributes import assigned
from ..runtime.collectives import uneven_collectives
from .keyed import BEYOND, request_keys
from .local import LocalRollout
from .transcript import Sampled, Transcript
from .trl_shapes import take_generated, trl_generated
from .worker import RolloutWorker


@dataclass
class MainWorker(RolloutWorker):
    """The worker of the main thread, where users' overrides run.

    Attributes:
        active_rollout: the rollout whose turns a user's `_generate` runs; None outside of it.
        active_chunk: the transcripts that a user's `_generate_single_turn` samples for; None outside of it.
    """

    active_rollout: LocalRollout | None = None
    active_chunk: list[Transcript] | None = None
    _super_calls: int = field(default=0, init=False)  # by the override that runs
    _known_ends: dict[tuple[int, ...], bool] = field(default_factory=dict, init=False)  # of that rollout

    def converse(self, local: LocalRollout) -> None:
        """Run the turns, by the user's `_generate` if there is one."""
        if (generate := local.terms.hooks.generate) is None:
            super().converse(local)
            return
        with assigned(self, active_rollout=local, _super_calls=0):
            take_generated(local, generate([transcript.prompt for transcript in local.transcripts]))

    def generate_for_trl(self, prompts: Sequence[Any]) -> tuple[Any, ...]:
        """`super()._generate` of an override: the turns of any list of prompts; TRL's tuple of eight."""
        local = self.active_rollout
        assert local is not None
        known, terms, transcripts = local.transcripts, local.terms, []
        keys = request_keys(local.request, len(prompts), terms.seed, terms.training, self._next_super_call())
        for place, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
            row = known[place] if place < len(known) else Transcript({"prompt": prompt}, key, place)
            row = dataclasses.replace(row, key=key, tool_calls=0, tool_failures=0)
            row.set_prompt(prompt)
            transcripts.append(row)
        part = LocalRollout(local.request, terms, transcripts)
        super().converse(part)
        local.known_ends |= {tuple(row.ids): row.ended for row in transcripts}
        for place, row in enumerate(transcripts if known else ()):
            known[place % len(known)].tool_calls += row.tool_calls
            known[place % len(known)].tool_failures += row.tool_failures
        return trl_generated(part)

    def sample_turn(self, local: LocalRollout, transcripts: list[Transcript]) -> list[Sampled]:
        """One turn, chunk by chunk by the user's `_generate_single_turn` if there is one, called as TRL calls it."""
        turn, sharded = local.terms.hooks.turn, self.settings.sharded
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
                assigned(self, active_chunk=chunk, _super_calls=0, _known_ends=local.known_ends),
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

    def turn_for_trl(
        self, prompt_ids: Sequence[Sequence[int]], images: Sequence[Any] | None, config: Any, num_generations: int
    ) -> tuple[list[list[int]], Any]:
        """`super()._generate_single_turn` of an override: new tokens for rows of the chunk, after any tokens."""
        chunk, call_number = self.active_chunk, self._next_super_call()
        assert chunk is not None
        rows = []
        for place, ids in enumerate(prompt_ids):
            row = chunk[min(place, len(chunk) - 1)]
            key, cut = row.key, len(ids) - len(row.ids)
            if place >= len(chunk) or call_number:  # a row that the override has added, or a further call
                added = place if place >= len(chunk) else 0
                key = int(mix(torch.tensor(key), BEYOND + added + (call_number << 20)))
            if images is not None:
                row = dataclasses.replace(row, images=list(images[place] or ()), number=None)
            rows.append(dataclasses.replace(row, key=key, prompt_ids=list(ids[:cut]), ids=list(ids[cut:])))
        sampled = self.engine.generate(rows, config, num_generations)
        self._known_ends.update({tuple(row.ids): row.ended for row in sampled if row.ended is not None})
        logps = [row.logps for row in sampled]
        return [row.ids for row in sampled], None if any(values is None for values in logps) else logps

    def _next_super_call(self) -> int:
        """The number of the override's next call of `super()`, from 0."""
        self._super_calls += 1
        return self._super_calls - 1
