"""A step's gradients and logged numbers are the same for every partition into micro-batches."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.batching.micro_batches import MicroBatch, StepSizes, cut_by_count
from grpo_ext.errors import PrecisionError
from grpo_ext.step.gradients import FixedPointGradients, NativeGradients, accumulating
from grpo_ext.step.statistics import StepMetrics


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    plugin = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
    return Accelerator(cpu=True, gradient_accumulation_plugin=plugin)


def plan(rows: int, cap: int, at_least: int = 1) -> list[MicroBatch]:
    """Rows 0, 1, ... cut by count, and filled up."""
    sizes = StepSizes([0] * rows, [1] * rows, [1] * rows)
    parts = [MicroBatch(tuple(part)) for part in cut_by_count(sizes, range(rows), cap)]
    return parts + [MicroBatch((0,), weight=0.0)] * (at_least - len(parts))


X = torch.randn(11, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradient(accelerator, micro_batches, kind: Any, factor_of: Callable[[MicroBatch], float]) -> torch.Tensor:
    """Gradient of the mean squared output over the step, with that step-wide denominator."""
    model = torch.nn.Linear(4, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.5)
    with accumulating(accelerator, kind and kind(model, accelerator), len(micro_batches), False) as backward:
        for part in micro_batches:
            with accelerator.accumulate(model):
                backward(factor_of(part) * (model(X[list(part.rows)]) ** 2).sum() / 11, True)
    return model.weight.grad


@pytest.mark.parametrize("cap", [1, 3, 11])
@pytest.mark.parametrize("at_least", [1, 13])
@pytest.mark.parametrize("kind", [NativeGradients, FixedPointGradients, None])  # None: of sharded weights
def test_the_gradient_of_a_step_does_not_depend_on_its_micro_batches(accelerator, kind, cap, at_least):
    expected = (2 * (X @ torch.full((4, 1), 0.5, dtype=torch.float64)) * X).sum(0, keepdim=True) / 11
    actual = gradient(accelerator, plan(11, cap, at_least), kind, lambda part: part.weight)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_not_finite_stops_bitwise_mode(accelerator):
    with pytest.raises(PrecisionError, match="gradient of weight is not finite"):
        gradient(accelerator, plan(11, 2), FixedPointGradients, lambda part: math.inf if 3 in part.rows else 1.0)


CPU = torch.device("cpu")
LENGTHS = (4, 2, 0, 3, 1, 4)


def values() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(4) < torch.tensor(LENGTHS)[:, None]).long()
    return torch.randn(len(LENGTHS), 4, generator=generator), mask


def metered(parts: list[tuple[list[int], float]]) -> dict[str, float]:
    """All kinds of metrics of a step, from parts (rows, weight)."""
    metrics, (tokens, mask) = StepMetrics(CPU), values()
    for rows, weight in parts:
        part = metrics.of_weight(weight)
        part.add_total("loss", (tokens[rows] * mask[rows]).sum())
        part.add_tokens({"entropy": tokens[rows].flatten()}, mask[rows].flatten())
        part.add_sequences("phi", tokens[rows, :1])
        per_row = (tokens[rows] * mask[rows]).sum(1) / mask[rows].sum(1)  # NaN where a row has no token
        part.add_extreme("low_min", per_row, lowest=True)
        part.add_extreme("high_max", per_row)
    return metrics.reduce()


@st.composite
def partitions(draw):
    rows = draw(st.permutations(range(len(LENGTHS))))
    cuts = sorted(draw(st.sets(st.integers(1, len(LENGTHS) - 1))))
    return [(list(rows[a:b]), 1.0) for a, b in itertools.pairwise([0, *cuts, len(rows)])]


def test_metrics_are_their_definitions():
    tokens, mask = values()
    real = tokens[mask.bool()].double()
    means = [tokens[i, :n].mean().item() for i, n in enumerate(LENGTHS) if n]
    expected = {
        "loss": real.sum().item(),
        "entropy": real.mean().item(),
        "phi": tokens[:, 0].mean().item(),
        "low_min": min(means),
        "high_max": max(means),
    }
    assert metered([(list(range(len(LENGTHS))), 1.0)]) == pytest.approx(expected, rel=1e-6)
    first, second = metered([([0, 1], 1.0)]), metered([([2, 3, 4, 5], 1.0)])  # whose mean is another
    assert abs((first["entropy"] + second["entropy"]) / 2 - expected["entropy"]) > 1e-3


@given(partitions(), st.lists(st.integers(0, len(LENGTHS) - 1), max_size=3))
def test_metrics_do_not_depend_on_the_partition_and_weight_zero_adds_nothing(parts, fillers):
    whole = metered([(list(range(len(LENGTHS))), 1.0)])
    assert metered(parts + [([row], 0.0) for row in fillers]) == pytest.approx(whole, rel=1e-6)


def test_sums_are_float64_so_that_the_order_does_not_show():
    numbers = [1e8, 1.0, -1e8, 1.0] * 3  # in float32 the ones would be lost
    results = set()
    for order in (numbers, sorted(numbers), sorted(numbers, reverse=True)):
        metrics = StepMetrics(CPU)
        for number in order:
            metrics.add_total("loss", torch.tensor(number))
            metrics.add("mean", torch.tensor(number), 1.0)
        results.add(tuple(metrics.reduce().values()))
    assert results == {(6.0, 0.5)}
