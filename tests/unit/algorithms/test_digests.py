"""Digests of ids and weights: the same everywhere, and another one for any change."""

import math

import pytest
import torch

from grpo_ext.algorithms import digests
from grpo_ext.algorithms.digests import PROJECTIONS, WeightDigest, digest, layer_groups
from grpo_ext.run.trail_comparison import distance

SIZE = 3 * (1 << 16) + 5  # more than three blocks


def digest_of(values: torch.Tensor, name: str = "a.weight") -> WeightDigest:
    found = WeightDigest()
    found.add(name, values)
    return found


def drawn(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (0.05 * torch.randn(SIZE, generator=torch.Generator().manual_seed(0))).to(dtype)


def test_digests_are_those_of_every_machine():
    assert digest(torch.tensor([1, 2, 3])) == "d91a3b8fd232c860"
    assert digest("a", "b") == "cfb9cbd0aeeea44e"
    assert digest_of(torch.arange(5.0)).as_list()[0] == "51e3d0a2826e0c40"


def test_of_ids_any_change_is_seen():
    values = [torch.tensor(ids) for ids in ([1, 2], [2, 1], [1, 2, 0], [1], [])]
    assert len({digest(ids) for ids in values}) == 5
    assert digest(torch.tensor([1]), torch.tensor([2])) != digest(torch.tensor([1, 2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_bit_a_place_and_a_name_change_a_digest_of_weights(dtype):
    values = drawn(dtype)
    integers = digests._INTEGERS[values.element_size()]
    flipped, swapped, negative, turned = (values.clone() for _ in range(4))
    flipped.view(integers)[70_000] ^= 1
    swapped[[3, 70_000]] = swapped[[70_000, 3]]
    negative[-1] *= -1
    turned[[3, 5]] = values[3] * turned.new_tensor([-1, 1])  # two elements that only differ in their sign
    opposite = turned.clone()
    opposite[[3, 5]] *= -1
    found = [digest_of(part) for part in (values, flipped, swapped, negative, turned, opposite)] + [
        digest_of(values, "b.weight")
    ]
    assert len({one.total for one in found}) == 7
    assert digest_of(values).as_list() == digest_of(values.view(1, -1)).as_list()


def test_chunks_of_a_parameter_do_not_matter(monkeypatch):
    whole = digest_of(drawn())
    monkeypatch.setattr(digests, "_CHUNKS", {"cpu": 3})
    parts = digest_of(drawn())
    assert whole.total == parts.total
    torch.testing.assert_close(whole.projections, parts.projections)


@pytest.mark.parametrize("size", [5, 1024, 1030, (1 << 16) - 3, (1 << 16) + 5])
def test_zeros_after_the_last_element_add_nothing(size):
    """So a parameter smaller than a block need not be padded to one."""
    values = drawn()[:size]
    padded = torch.nn.functional.pad(values, (0, 3 * (1 << 16) - size))
    assert digest_of(values).total == digest_of(padded).total
    # float32 sums of 1,024 elements of about 0.05, in another order
    torch.testing.assert_close(digest_of(values).projections, digest_of(padded).projections, rtol=0, atol=1e-5)
    assert digest_of(values[:-1]).total != digest_of(values).total


def test_projections_estimate_how_far_apart_weights_are():
    values, estimates = drawn(), []
    for seed in range(100):
        step = 1e-6 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed + 1))
        moved = values.double() + step
        estimates.append(distance(*(digest_of(x).as_list()[1] for x in (values.double(), moved))) / float(step.norm()))
    assert 0.9 < math.hypot(*estimates) / math.sqrt(len(estimates)) < 1.1
    assert len(digest_of(values).as_list()[1]) == PROJECTIONS


def test_groups_of_layers_are_at_most_sixteen():
    names = [
        "model.embed.weight",
        *(f"model.layers.{n}.{part}" for n in range(60) for part in "qk"),
        "model.norm.weight",
    ]
    groups = layer_groups(names)
    found = list(dict.fromkeys(groups.values()))
    assert found[:2] == ["model.embed to model.layers.2", "model.layers.3 to model.layers.6"]
    assert (found[-1], len(found)) == ("model.layers.59 to model.norm", 16)
    assert layer_groups(["h.0.w", "h.1.w"]) == {"h.0.w": "h.0", "h.1.w": "h.1"}
