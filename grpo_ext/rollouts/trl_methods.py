"""TRL's sampling methods, with TRL's arguments and results, for users who call them, mostly by `super()`.

A call by an override that runs (`UserCalls`) belongs to its rollout batch. Any other call is a rollout of its own, with
random numbers of its own. Called by the trainer.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..algorithms.keyed_random import mix
from ..batching.prompt_order import RolloutRequest, StepRows
from ..batching.sizes import StepLayout, ceil_div
from ..runtime.collectives import gather_lists
from .keyed import BEYOND, request_keys
from .local import GenerateCall, LocalRollout, RewardsCall, ScoreCall, TurnCall
from .settings import sampling_config
from .source import Rollouts
from .transcript import Transcript
from .trl_shapes import trl_dictionary, trl_generated


@dataclass
class TrlMethods:
    rollouts: Rollouts
    _free_requests: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)

    def __post_init__(self) -> None:
        self.view, self.worker = self.rollouts.view, self.rollouts.worker

    def score(self, inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """`_generate_and_score_completions`: TRL's padded dictionary of any rows of this process."""
        rollouts, settings = self.rollouts, self.rollouts.settings_now()
        sampling = settings.sampling
        call = self.worker.calls.innermost(ScoreCall)
        rows, rounds = list(inputs), [] if call is None else call.rounds
        request = self._request(rows, sampling.num_generations)
        rollouts.send_weights()
        local = rollouts.sample(StepRows(rows, request), settings, repeat=len(rounds))
        rounds.append(rollouts.join(local))
        if call is None or not (self.view.args.dynamic_sampling and sampling.training):
            rollouts.log.add(rounds[-1:], settings, {})
        return trl_dictionary(local, rounds[-1], self.worker.images, self.worker.settings)

    def rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
        """`_calculate_rewards` of this process's rows: (B, F) of all processes, in global order."""
        settings = self.rollouts.settings_now()
        call = self.worker.calls.innermost(RewardsCall)
        request = self._request(inputs, settings.sampling.num_generations)
        local = LocalRollout(request, settings) if call is None else replace(call.local, request=request)
        columns = ([], [], [], []) if request.stands_in else (inputs, prompts, completions, ids)
        rewards_BF, calls = self.worker.compute_rewards(local, *columns)
        shares = gather_lists([(rewards_BF, calls)])
        if call is not None:
            call.reward_calls = [reward_call for _, part in shares for reward_call in part]
        else:  # called by other code of the user, which logs where TRL's methods do
            for reward_call in calls:
                for name, value in reward_call.metrics:
                    settings.rewards.pending_metrics.setdefault(name, []).append(value)
                for name, values in reward_call.columns.items():
                    settings.rewards.pending_columns.setdefault(name, []).extend(values)
        return torch.cat([rewards for rewards, _ in shares]).to(self.view.accelerator.device)

    def generate(self, prompts: Sequence[Any]) -> tuple[Any, ...] | None:
        """`_generate`: TRL's tuple of eight, from the turns of any prompts; None outside of a user's `_generate`."""
        if (call := self.worker.calls.innermost(GenerateCall)) is None:
            return None
        local, transcripts = call.local, []
        known, sampling = local.transcripts, local.settings.sampling
        repeat = next(call.super_calls)
        keys = request_keys(local.request, len(prompts), sampling.seed, sampling.training, repeat)
        for place, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
            row = known[place] if place < len(known) else Transcript({"prompt": prompt}, key, place)
            row = replace(row, key=key, tool_calls=0, tool_failures=0)
            row.set_prompt(prompt)
            transcripts.append(row)
        part = LocalRollout(local.request, local.settings, transcripts)
        self.worker.run_turns(part)
        call.made += transcripts
        return trl_generated(part)

    def turn(self, prompt_ids: Sequence[Sequence[int]], images: Sequence[Any] | None) -> tuple[Any, Any] | None:
        """`_generate_single_turn`: new tokens after any tokens, and their log-probabilities.

        None, so that TRL's method answers, outside of a user's `_generate_single_turn` and with continuous batching.
        """
        call = self.worker.calls.innermost(TurnCall)
        if call is None or self.view.use_transformers_continuous_batching:
            return None
        chunk, repeat, rows = call.chunk, next(call.super_calls), []
        for place, ids in enumerate(prompt_ids):
            row = chunk[min(place, len(chunk) - 1)]
            key, cut = row.key, len(ids) - len(row.ids)
            if place >= len(chunk) or repeat:  # a row that the override has added, or a further call
                added = place if place >= len(chunk) else 0
                key = int(mix(torch.tensor(key), BEYOND + added + (repeat << 20)))
            if images is not None:
                row = replace(row, images=list(images[place] or ()), number=None)
            rows.append(replace(row, key=key, prompt_ids=list(ids[:cut]), ids=list(ids[cut:])))
        config = None if self.view.use_vllm else sampling_config(self.view)
        sampled = self.worker.engine.generate(rows, config, call.sizes)
        call.made += sampled
        logps = [row.logps for row in sampled]
        return [row.ids for row in sampled], None if any(values is None for values in logps) else logps

    def _request(self, rows: Sequence[Mapping[str, Any]], group: int) -> RolloutRequest:
        """The request of a user's override, or a new one, with the columns of all processes' rows; a collective."""
        columns = tuple(dict.fromkeys(name for keys in gather_lists([list(row) for row in rows]) for name in keys))
        if (rewarding := self.worker.calls.innermost(RewardsCall)) is not None:
            return replace(rewarding.local.request, columns=columns)
        if (scoring := self.worker.calls.innermost(ScoreCall)) is not None:
            return replace(scoring.request, columns=columns)
        prompts, rank = ceil_div(len(rows), group), self.view.accelerator.process_index
        layout = StepLayout(BEYOND + next(self._free_requests), 0, 0, range(prompts), range(len(rows)))
        return RolloutRequest(0, layout, range(rank * prompts, (rank + 1) * prompts), False, group, columns=columns)
