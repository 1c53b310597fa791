"""Step-wide statistics: a micro-batch that only keeps the collectives aligned adds nothing to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_ext.algorithms.losses import router_statistics
from grpo_ext.batching.micro_batches import MicroBatch
from grpo_ext.errors import ModelError
from grpo_ext.step.loss import _router_loss
from grpo_ext.step.metrics import StepMetrics
from grpo_ext.step.statistics import MicroBatchStatistics, StepContext, set_statistics, step_counts


def measured(row: int, weight: float) -> MicroBatchStatistics:
    """A completion of 2 tokens with entropy `row` behind a prompt of 2, all of which choose the expert `row` of 3."""
    logits = torch.nn.functional.one_hot(torch.full((4,), row), 3).float()
    experts = router_statistics((logits,), torch.ones(1, 4), top_k=1)
    return MicroBatchStatistics(MicroBatch((row,), weight), torch.full((1, 2), float(row)), torch.ones(1, 2), experts)


def statistics(weights: list[float]) -> StepContext:
    context = StepContext(step_counts([2] * 3, [0] * 3), StepMetrics(torch.device("cpu")))
    set_statistics(context, [measured(row, weight) for row, weight in enumerate(weights)], 0.5)
    return context


def test_a_micro_batch_of_weight_zero_adds_nothing():
    context = statistics([1.0, 1.0, 0.0])
    assert (context.expert_share.tolist(), context.router_rows) == ([0.5, 0.5, 0.0], 8)
    assert context.entropy_threshold == pytest.approx(0.5, abs=1e-4)  # between those of the first two
    assert context.counts.entropy_tokens == 2


def test_with_a_weight_it_counts():
    context = statistics([1.0, 1.0, 1.0])
    assert context.expert_share.tolist() == pytest.approx([1 / 3] * 3)
    assert context.router_rows == 12
    assert context.counts.entropy_tokens == 4


def test_a_model_without_router_logits_is_told_what_to_set():
    part: Any = None
    with pytest.raises(ModelError, match=r"router_aux_loss_coef=0\.1 .* set router_aux_loss_coef=0"):
        _router_loss(0.1, None, part)
