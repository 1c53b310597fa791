"""TRL's sampling methods, and `generate`, for users who call them: most call TRL's by `super()` in an override.

The rows of a turn are in its `multimodal_fields`. A call of the others while the user's code runs for a rollout batch
belongs to it; any other is a rollout of its own, with random numbers of its own. Called by the trainer.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import send_to_device

from ..algorithms.keyed_random import mix
from ..batching.prompt_order import FIRST_ADDED, RolloutRequest, StepRows, request_keys
from ..batching.sizes import StepLayout, ceil_div
from ..errors import ConfigError
from ..forward.columns import ADVANTAGES, COMPLETION_MASK, KEPT_COUNTS, KEPT_IDS, RATIO, ROW, TOOL_MASK, TrlBatch
from ..rewards.guard import columns_of, metrics_of
from ..runtime.collectives import gather_lists
from ..sampling.by_user import TurnRows
from ..sampling.turn import Turn
from .batch import RolloutBatch, Values
from .join import Round, token_columns, with_ratios
from .local import LocalRollout
from .source import Rollouts
from .transcript import Transcript


@dataclass
class TrlMethods:
    rollouts: Rollouts
    _free_requests: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.view, self.worker = self.rollouts.view, self.rollouts.worker

    def score(self, inputs: Sequence[dict[str, Any]]) -> TrlBatch:
        """`_generate_and_score_completions`: TRL's padded dictionary of any rows of this process."""
        rollouts, settings, scoring = self.rollouts, self.rollouts.settings_now(), self.rollouts.scoring
        rows, columns = list(inputs), _columns_of(inputs)
        request, rounds = scoring or (self._own_request(len(rows), settings.num_generations), [])
        rollouts.send_weights()
        step_rows = StepRows(rows, replace(request, columns=columns, repeat=len(rounds)))
        local = rollouts.sample(step_rows, settings)
        rounds.append(rollouts.join(local))
        if scoring is None or not (self.view.args.dynamic_sampling and settings.training):
            rollouts.log.add(rounds[-1:], settings, {})
        return self._dictionary(local, rounds[-1])

    def rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
        """`_calculate_rewards` of this process's rows: (B, F) of all processes, in global order."""
        columns, rewarding = _columns_of(inputs), self.rollouts.rewarding
        # another call is of other code of the user, and logs where TRL's methods do
        local = rewarding or self._own_rollout(len(inputs))
        given = ([], [], [], []) if local.request.stands_in else (inputs, prompts, completions, ids)
        rewards_BF, calls = self.worker.compute_rewards(local, given, columns)
        shares = gather_lists([(rewards_BF, calls)])
        if rewarding is not None:
            rewarding.reward_calls = [call for _, part in shares for call in part]
        else:
            for name, numbers in metrics_of(calls).items():
                local.settings.pending_metrics[name].extend(numbers)
            for name, values in columns_of(calls, len(given[0])).items():
                local.settings.pending_columns[name].extend(values)
        return torch.cat([rewards for rewards, _ in shares]).to(self.view.accelerator.device)

    def generate(self, prompts: Sequence[Any]) -> dict[str, Any]:
        """One turn of the model for each prompt of this process, as a `rollout_func` may return it.

        In a `rollout_func` prompt i has the key of its place; further prompts, and further calls, draw other random
        numbers.
        """
        if isinstance(prompts, str) or not len(prompts):
            raise ConfigError(f"trainer.generate takes a list of prompts, texts or messages, and got {prompts!r}.")
        if (local := self.worker.in_progress) is None:
            local = self._own_rollout(len(prompts))
            self.rollouts.send_weights()
        settings, transcripts = local.settings, list[Transcript]()
        request = replace(local.request, repeat=next(local.generate_calls))
        keys = request_keys(request, len(prompts), settings.seed, settings.training)
        for place, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
            transcripts.append(Transcript(key, place, row={"prompt": prompt}))
            transcripts[-1].set_prompt(prompt)
        self.worker.tokenize(transcripts, settings)
        sampled = self.worker.generate(local, transcripts, settings.sampler.turns)
        local.known_ends |= {tuple(turn.ids): bool(turn.ended) for turn in sampled}
        logps = [turn.logps for turn in sampled]
        kept_ids = {"kept_ids": [_kept_ids(turn) for turn in sampled]} if settings.replay.masks else {}
        return {
            "prompt_ids": [row.prompt_ids for row in transcripts],
            "completion_ids": [turn.ids for turn in sampled],
            "logprobs": None if any(values is None for values in logps) else logps,
            "env_mask": [[1] * len(turn.ids) for turn in sampled],
            **kept_ids,
        }

    def turn(self, prompt_ids: Sequence[Sequence[int]], images: Any, fields: Any) -> tuple[Any, Any] | None:
        """`_generate_single_turn`: new tokens after any tokens, and their log-probabilities.

        None, so that TRL's method answers, without rows in `fields`.
        """
        turn: TurnRows | None = (fields or {}).get(ROW)
        if turn is None:
            return None
        chunk, repeat, rows = turn.chunk, next(turn.calls), []
        for place, ids in enumerate(prompt_ids):
            row = chunk[min(place, len(chunk) - 1)]
            key, cut = row.key, len(ids) - len(row.ids)
            if place >= len(chunk) or repeat:  # a row that the override has added, or a further call
                added = place if place >= len(chunk) else 0
                key = int(mix(torch.tensor(key), FIRST_ADDED + added + (repeat << 20)))
            if images is not None:
                row = replace(row, images=list(images[place] or ()), number=None)
            rows.append(replace(row, key=key, prompt_ids=list(ids[:cut]), ids=list(ids[cut:])))
        sampled = self.worker.engine.generate(rows, turn.config, turn.sizes)
        turn.made += sampled
        logps = [row.logps for row in sampled]
        return [row.ids for row in sampled], None if any(values is None for values in logps) else logps

    def _dictionary(self, local: LocalRollout, joined: Round) -> TrlBatch:
        """TRL's padded dictionary of this process's rows; its stand-ins have advantages of zero."""
        transcripts, settings = local.transcripts, self.worker.settings
        advantages = joined.advantages_B[joined.local_rows.start : joined.local_rows.stop]
        columns: dict[str, Values] = {ADVANTAGES: advantages if len(advantages) else torch.zeros(len(transcripts))}
        columns.update(token_columns(local, transcripts, with_masked=True))
        whole = with_ratios(columns, local.settings.ratios)
        batch = RolloutBatch.of_columns(whole, local.request.num_generations)
        dictionary = batch.as_trl(settings.pad, settings.multiple)
        masked = torch.tensor(local.settings.masked(transcripts))
        for name, value in {COMPLETION_MASK: 0, TOOL_MASK: 0, RATIO: 1}.items():  # as in TRL, on the padding too
            if name in dictionary:
                dictionary[name][masked] = value
        dictionary["num_items_in_batch"] = joined.batch.loss_masks.values.sum()
        dictionary = send_to_device(dictionary, settings.device)
        if (images := self.worker.images.of_transcripts(transcripts)) is not None:
            ids = torch.cat([dictionary["prompt_ids"], dictionary["completion_ids"]], dim=1)
            dictionary |= images.as_trl(ids)
        return dictionary

    def _own_rollout(self, rows: int) -> LocalRollout:
        settings = self.rollouts.settings_now()
        return LocalRollout(self._own_request(rows, settings.num_generations), settings)

    def _own_request(self, rows: int, group: int) -> RolloutRequest:
        """The request of a rollout of the user's own, beyond those of the run."""
        prompts, rank = ceil_div(rows, group), self.view.accelerator.process_index
        layout = StepLayout(FIRST_ADDED + next(self._free_requests), 0, 0, range(prompts), range(rows))
        return RolloutRequest(0, layout, range(rank * prompts, (rank + 1) * prompts), False, group)


def without_rows(fields: Any) -> Any:
    """`multimodal_fields` as TRL's method takes them."""
    return {name: value for name, value in fields.items() if name != ROW} if fields else fields


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The columns of all processes' rows; a collective."""
    names = dict.fromkeys(name for keys in gather_lists([list(row) for row in rows]) for name in keys)
    return tuple(name for name in names if name != ROW)


def _kept_ids(turn: Turn) -> list[list[int]]:
    if (counts_T := turn.columns.get(KEPT_COUNTS)) is None or (counts_T < 0).any():
        raise ConfigError(
            "trainer.generate with sampling_mask='replay': suppress_tokens or min_new_tokens leave out tokens that "
            "kept_ids has no place for, or the model samples in a way of its own; leave them out, or sampling_mask."
        )
    return [ids.tolist() for ids in turn.columns[KEPT_IDS].split(counts_T.tolist())]
