"""What is logged of a rollout batch: of several rounds, the values of all completions that were sampled."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.algorithms.advantages import AdvantageRule
from grpo_ext.algorithms.losses import RatioRule
from grpo_ext.rewards.worker import RewardCall
from grpo_ext.rollouts.batch import RolloutBatch
from grpo_ext.rollouts.join import Entry, Round
from grpo_ext.rollouts.ragged import Ragged
from grpo_ext.rollouts.records import add_to_table, rollout_metrics
from tests.support.batches import batch_of_rows


def a_round(rewards: list[float], tokens: list[int], truncated: list[bool], calls: int, failures: int) -> Round:
    entries = [Entry("p", "c", None, 1, n, cut, 0, 0) for n, cut in zip(tokens, truncated, strict=True)]
    entries[0] = dataclasses.replace(entries[0], tool_calls=calls, tool_failures=failures)
    batch = batch_of_rows([[1]] * len(entries), [[2] * n for n in tokens], torch.zeros(len(entries)), 2)
    logged = RewardCall("f", 0, 0, len(entries))
    logged.log_metric("share", rewards[0])
    columns = torch.tensor(rewards)[:, None]
    return Round(batch, columns, torch.zeros(len(entries)), entries, [logged], range(len(entries)))


def logged(rounds: list[Round], ratios: RatioRule | None = None) -> dict[str, float]:
    values = defaultdict(list)
    rewards = SimpleNamespace(names=["f"])
    terms: Any = SimpleNamespace(
        num_generations=2,
        rewards=rewards,
        weights_F=torch.ones(1),
        rule=AdvantageRule(),
        ratios=ratios,
        truncating={},
    )
    for name, value in rollout_metrics(rounds, terms, with_tools=True):
        values[name].append(value)
    assert all(len(entries) == 1 for entries in values.values())
    return {name: value for name, (value,) in values.items()}


def test_rounds_count_by_their_completions():
    first = a_round([1.0, 0.0, 1.0, 1.0], [3, 9, 4, 6], [False, True, False, True], calls=6, failures=3)
    second = a_round([0.5, 0.5], [2, 8], [True, True], calls=2, failures=0)
    values = logged([first, second])
    assert values["reward"] == pytest.approx(4.0 / 6)
    assert values["completions/mean_length"] == pytest.approx(32 / 6)
    assert (values["completions/min_length"], values["completions/max_length"]) == (2.0, 9.0)
    assert values["completions/clipped_ratio"] == pytest.approx(4 / 6)
    assert values["completions/mean_terminated_length"] == 3.5  # of the two that ended
    assert values["tools/call_frequency"] == pytest.approx(8 / 6)
    assert values["tools/failure_frequency"] == pytest.approx(3 / 8)
    assert values["frac_reward_zero_std"] == pytest.approx(4 / 6)  # two groups of three
    assert values["share"] == 0.75  # a mean of the calls
    assert logged([first])["reward"] == 0.75


def test_columns_that_are_not_logged_in_every_rollout_stay_as_long_as_the_prompts():
    column = functools.partial(deque, maxlen=6)  # as in TRL's record
    table: Any = {name: column() for name in ("prompt", "completion", "advantages", "images")}
    table |= {name: defaultdict(column) for name in ("rewards", "extra")}
    for columns in ({}, {"a": [1, 2, 3, 4]}, {"b": [5, 6, 7, 8]}):
        part = a_round([1.0, 0.0, 1.0, 1.0], [3, 9, 4, 6], [False] * 4, calls=0, failures=0)
        part.reward_calls[0].columns.update(columns)
        terms: Any = SimpleNamespace(table=table, rewards=SimpleNamespace(names=["f"]))
        add_to_table(part, terms)
    assert {name: list(column) for name, column in table["extra"].items()} == {
        "a": [3, 4, None, None, None, None],
        "b": [None, None, 5, 6, 7, 8],
    }
    assert len(table["rewards"]["f"]) == len(table["prompt"]) == 6


def by_vllm(old: list[float], sampled: list[float], ratios: list[float], mask: list[int]) -> Round:
    """A round of one group; of its two completions the second is masked out."""
    rows = [(values, [0.0] * len(values)) for values in (old, sampled, ratios)]
    names = ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
    columns: Any = {name: Ragged.of(list(map(torch.tensor, row))) for name, row in zip(names, rows)}
    masks, advantages = Ragged.of([torch.tensor(mask), torch.zeros(len(mask), dtype=torch.long)]), torch.zeros(2)
    tokens = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), masks)
    batch = RolloutBatch.of_columns({**columns, **tokens, "advantages": advantages}, 2)
    return Round(batch, torch.zeros(2, 1), advantages, [Entry("p", "c", None, 1, 1, False)] * 2, [], range(2))


def test_how_far_vllm_is_from_the_trainer_is_a_mean_over_the_tokens_of_all_rounds():
    first = by_vllm([-1.0, -2.0, -3.0], [-1.5, -2.0, math.nan], [1.5, 1.0, 1.0], [1, 1, 1])
    second = by_vllm([-1.0, -9.0], [-3.0, -1.0], [0.5, 9.0], [1, 0])
    values = logged([first, second], RatioRule("token_mask", None, None))
    assert values["sampling/sampling_logp_difference/mean"] == pytest.approx(2.5 / 3)
    assert values["sampling/sampling_logp_difference/max"] == 2.0
    ratios = [values[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")]
    assert ratios == [0.5, 1.0, 1.5]
