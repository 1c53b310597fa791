"""Log-probabilities over the tokens that sampling kept: the algebra and its derivative, against all logits at once."""

from __future__ import annotations

import pytest
import torch

from grpo_ext.forward import tiled_log_probs as module
from grpo_ext.forward.sampling_masks import KeptIds, SamplingMasks
from grpo_ext.forward.tiled_log_probs import LogitTransform, tiled_log_probs
from tests.tolerances import FLOAT64_SUMS

COUNTS = torch.tensor([3, 1, 0, -1, 2, -2, 4], dtype=torch.int32)
IDS = torch.tensor([0, 5, 9, 7, 1, 10, 2, 3, 4, 8], dtype=torch.int32)
TARGETS = torch.tensor([5, 7, 3, 0, 10, 1, 8])
SUPPRESSED = (torch.tensor([4]), torch.tensor([4, 9]))
TRANSFORMS = (LogitTransform(temperature=0.9), LogitTransform(scale=2.0, cap=1.5, temperature=0.9))


def masks() -> SamplingMasks:
    """Of three rows, of which the second has no tokens."""
    rows = (KeptIds(COUNTS[:3], IDS[:4]), KeptIds(COUNTS[:0], IDS[:0]), KeptIds(COUNTS[3:], IDS[4:]))
    return SamplingMasks.of(rows, SUPPRESSED)


def kept() -> torch.Tensor:
    """The same, as one mask (7, 11) written by hand."""
    rows = [[0, 5, 9], [7], range(11), set(range(11)) - {4}, [1, 10], set(range(11)) - {4, 9}, [2, 3, 4, 8]]
    return torch.tensor([[token in row for token in range(11)] for row in rows])


def case(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = ((7, 5), (11, 5), (11,))
    return [torch.randn(*s, generator=source, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def naive(hidden, weight, bias, transform):
    logits = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    logps = (logits / transform.temperature).masked_fill(~kept(), -torch.inf).log_softmax(-1)
    entropy = -(logps.exp() * logps.masked_fill(~kept(), 0)).sum(-1)
    return logps.gather(1, TARGETS[:, None])[:, 0], entropy


@pytest.fixture(params=[(64, 64), (3, 4)], ids=["one tile", "several"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(module, "CPU_TILE", request.param)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "capped"])
def test_probabilities_and_entropies_are_those_over_the_kept_tokens(transform):
    inputs = case()
    logps, entropies = tiled_log_probs(*inputs, TARGETS, transform, masks=masks())
    expected = naive(*inputs, transform)
    assert torch.allclose(logps, expected[0], rtol=0, atol=FLOAT64_SUMS)
    assert torch.allclose(entropies, expected[1], rtol=0, atol=FLOAT64_SUMS)
    everything, _ = tiled_log_probs(*inputs, TARGETS, transform)  # the control: without masks
    assert [bool(same) for same in (everything - logps).abs() < 1e-6] == [False, False, True, *[False] * 4]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "capped"])
def test_the_backward_pass_is_the_derivative(transform):
    def both(*inputs):
        return tiled_log_probs(*inputs, TARGETS, transform, masks=masks())

    assert torch.autograd.gradcheck(both, case())


@pytest.mark.parametrize("with_entropy", [True, False])
def test_a_token_that_was_chosen_from_itself_alone_has_probability_one_and_no_gradient(with_entropy):
    hidden, weight, bias = case(torch.float32)
    logps, entropies = tiled_log_probs(hidden, weight, bias, TARGETS, TRANSFORMS[0], with_entropy, masks=masks())
    assert logps[1].item() == 0.0
    assert entropies is None or entropies[1].item() == 0.0
    assert not torch.autograd.grad(logps[1], hidden)[0].any()


def test_rows_are_cut_with_their_ids():
    rows = (KeptIds(COUNTS[:3], IDS[:4]).first(1), KeptIds(COUNTS[3:], IDS[4:]).first(3))
    assert [row.counts_T.tolist() for row in rows] == [[3], [-1, 2, -2]]
    assert [row.ids_K.tolist() for row in rows] == [[0, 5, 9], [1, 10]]
