"""What is logged of a rollout batch: of several rounds, the values of all completions that were sampled."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.algorithms.advantages import AdvantageRule
from grpo_ext.rewards.calls import RewardCall
from grpo_ext.rollouts.join import Entry, Round
from grpo_ext.rollouts.records import rollout_metrics
from tests.support.batches import batch_of_rows


def a_round(rewards: list[float], tokens: list[int], truncated: list[bool], calls: int, failures: int) -> Round:
    entries = [Entry("p", "c", None, 1, n, cut, 0, 0) for n, cut in zip(tokens, truncated, strict=True)]
    entries[0] = dataclasses.replace(entries[0], tool_calls=calls, tool_failures=failures)
    batch = batch_of_rows([[1]] * len(entries), [[2] * n for n in tokens], torch.zeros(len(entries)), 2)
    logged = RewardCall("f", 0, 0, len(entries))
    logged.log_metric("share", rewards[0])
    columns = torch.tensor(rewards)[:, None]
    return Round(batch, columns, torch.zeros(len(entries)), entries, [logged], range(len(entries)))


def logged(rounds: list[Round]) -> dict[str, float]:
    values = defaultdict(list)
    rewards = SimpleNamespace(names=["f"])
    terms: Any = SimpleNamespace(
        num_generations=2, rewards=rewards, weights_F=torch.ones(1), rule=AdvantageRule(), ratios=None
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


def test_a_round_in_which_nothing_ended_says_nothing_of_the_lengths_of_what_ended():
    ended = a_round([1.0, 0.0], [5, 7], [False, False], 0, 0)
    cut = a_round([1.0, 0.0], [1, 1], [True, True], 0, 0)
    assert logged([ended, cut])["completions/min_terminated_length"] == 5.0
    assert logged([cut])["completions/min_terminated_length"] == 0.0
    assert logged([cut])["tools/failure_frequency"] == 0.0
