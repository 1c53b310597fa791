"""What processes have made is put together in their order, and what does not fit is an error on every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.algorithms.advantages import AdvantageRule
from grpo_ext.batching.prompt_order import RolloutRequest
from grpo_ext.batching.sizes import StepLayout
from grpo_ext.errors import RolloutError
from grpo_ext.replay import Replay
from grpo_ext.rewards.guard import RewardCall, columns_of
from grpo_ext.rollouts import join as module
from grpo_ext.rollouts.images import ImageSource
from grpo_ext.rollouts.join import exchange, join
from grpo_ext.rollouts.local import LocalRollout, Terms
from grpo_ext.rollouts.transcript import Sampled, Transcript

END = 1
TERMS: Any = SimpleNamespace(
    num_generations=2, rule=AdvantageRule(), weights_F=torch.ones(1), masks_truncated=False, ratios=None, ends={END}
)
TERMS.logs_images, TERMS.replay = False, Replay()
TERMS.masked = partial(Terms.masked, TERMS)


def part(
    prompts: Sequence[int],
    mask: Sequence[int] | None = None,
    logps: Sequence[float] | None = None,
    failure: Exception | None = None,
) -> LocalRollout:
    """Groups of two, of prompts whose rewards are their numbers and half a point more."""
    layout = StepLayout(0, 0, 0, range(4), range(8))
    numbers = range(min(prompts, default=0), max(prompts, default=-1) + 1)
    local = LocalRollout(RolloutRequest(0, layout, numbers, not prompts, 2), TERMS, failure=failure)
    for prompt in prompts:
        for copy in range(2):
            row = Transcript({"prompt": f"p{prompt}"}, 0, prompt=f"p{prompt}", prompt_ids=[10 + prompt])
            row.add_sampled(Sampled([20 + copy, END], None if logps is None else list(logps)))
            row.mask = list(mask or row.mask)
            local.transcripts.append(row)
    local.has_mask = mask is not None
    local.rewards_BF = torch.tensor([[prompt + copy / 2] for prompt in prompts for copy in range(2)]).view(-1, 1)
    return local


def joined(monkeypatch: Any, parts: Sequence[LocalRollout], rank: int = 0) -> Any:
    """As the process `rank` of several sees it."""
    shares = [module._share(local, ImageSource()) for local in parts]
    monkeypatch.setattr(module, "gather_lists", lambda own: shares)
    return join(exchange(parts[rank], ImageSource()), TERMS, rank)


def test_calls_of_reward_functions_are_in_the_order_of_completions_and_functions(monkeypatch):
    parts = [part([0]), part([1])]
    for local in parts:  # as workers end: the second function first
        for name, number in (("second", 1), ("first", 0)):
            local.reward_calls.append(RewardCall(name, number, local.first, 2, [], {"by": [name] * 2}))
    calls = joined(monkeypatch, parts).reward_calls
    assert [(call.first, call.number) for call in calls] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert columns_of(calls, 4) == {"by": ["second"] * 4}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mask_on_one_process_means_tokens_of_the_model_on_the_other(monkeypatch, rank):
    parts = [part([0], mask=[1, 0]), part([1])]
    found = joined(monkeypatch, [parts[rank], parts[1 - rank]]).batch
    masks = [[1, 0], [1, 0], [1, 1], [1, 1]]
    assert [row.tolist() for row in found.loss_masks] == (masks if rank == 0 else masks[::-1])
    assert "tool_mask" not in joined(monkeypatch, [part([0]), part([1])]).batch.columns


@pytest.mark.parametrize("rank", [0, 1])
def test_log_probabilities_on_some_processes_alone_are_refused(monkeypatch, rank):
    parts = [part([0], logps=[-1.0, -2.0]), part([1])]
    with pytest.raises(RolloutError, match="sampling_per_token_logps came with some completions"):
        joined(monkeypatch, parts, rank)
    assert len(joined(monkeypatch, [part([0], logps=[-1.0, -2.0]), part([])]).batch) == 2  # it has no row


def test_what_ended_a_local_phase_is_raised_by_the_join():
    failure = ConnectionError("no sandbox")
    with pytest.raises(ConnectionError) as caught:
        exchange(part([], failure=failure), ImageSource())
    assert caught.value is failure


def test_rewards_of_another_number_of_rows_are_refused(monkeypatch):
    local = part([0])
    local.rewards_BF = torch.zeros(3, 1)
    with pytest.raises(RolloutError, match="3 rewards for 2 completions in groups of 2"):
        joined(monkeypatch, [local])
