"""Fixed-point sums have the same bits in every order and grouping, and find what they cannot hold."""

import pytest
import torch

from grpo_ext.errors import PrecisionError
from grpo_ext.precision import fixed_point
from grpo_ext.precision.fixed_point import FixedPointSum, check_terms, largest_term, to_fixed


def terms() -> list[torch.Tensor]:
    """Heavy-tailed terms, whose float sums depend on the order."""
    generator = torch.Generator().manual_seed(0)
    heavy = [torch.randn(2, 500, generator=generator) for _ in range(9)]
    return [1e-3 * sign * torch.exp(4 * size) for sign, size in heavy]


def fixed(parts: list[torch.Tensor]) -> FixedPointSum:
    total = FixedPointSum(parts[0])
    for part in parts:
        total.add(part)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_every_order_and_grouping_gives_the_same_bits(seed):
    parts = terms()
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = [parts[i] for i in order]
    whole = fixed(parts).value(torch.float32)
    assert torch.equal(fixed(shuffled).value(torch.float32), whole)
    cut = 1 + seed
    joined = fixed(shuffled[:cut])
    joined.total += fixed(shuffled[cut:]).total
    assert torch.equal(joined.value(torch.float32), whole)
    assert not torch.equal(sum(shuffled), sum(reversed(shuffled)))  # float sums depend on the order


def test_rounding_is_to_the_nearest_step():
    assert to_fixed(torch.tensor([0.52, -0.52, 0.48]) * 2.0**-48).tolist() == [1, -1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_term_is_rounded_as_in_float64(dtype):
    values = torch.cat([part.flatten() * scale for part in terms() for scale in (1e-12, 1e-6, 1.0)]).to(dtype)
    assert torch.equal(to_fixed(values), (values.double() * 2.0**48).round().long())
    assert to_fixed(values).unique().numel() > 1000 or dtype == torch.float16


@pytest.mark.parametrize("shape", [(1000,), (25, 40), (1, 1), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_slices_do_not_change_the_bits(monkeypatch, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    parts.append(torch.randn(shape[::-1], generator=generator).to(dtype).T if len(shape) == 2 else parts[0])
    whole = fixed(parts)
    monkeypatch.setattr(fixed_point, "_SLICE", 64)
    sliced = fixed(parts)
    assert torch.equal(sliced.total, whole.total)
    assert torch.equal(sliced.total, sum(to_fixed(part) for part in parts))
    assert torch.equal(sliced.largest, whole.largest)
    assert torch.equal(sliced.value(dtype), (whole.total.double() * 2.0**-48).to(dtype))
    assert sliced.value(dtype).shape == shape


def test_the_sum_is_exact_to_half_a_step_per_term():
    parts = terms()
    exact = sum(part.double() for part in parts)
    assert float((fixed(parts).value(torch.float64) - exact).abs().max()) <= len(parts) * 2.0**-49 * (1 + 1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_terms_that_are_not_finite_are_refused(bad):
    total = fixed([torch.tensor([1.0, bad]), torch.tensor([1.0, 2.0])])
    with pytest.raises(PrecisionError, match=r"gradient of w is not finite"):
        check_terms("w", 2, float(total.largest))


def test_the_largest_sum_that_fits_is_right_and_the_next_is_refused():
    limit = largest_term(4)
    total = fixed([torch.tensor([limit])] * 4)
    check_terms("w", 4, float(total.largest))
    assert total.value(torch.float64).item() == 4 * limit
    with pytest.raises(PrecisionError, match="48 fraction bits hold up to"):
        check_terms("w", 4, limit * 1.001)
    check_terms("w", 2, limit * 1.001)  # fewer terms leave more room
