"""Log-probabilities in tiles: the derivative, the algebra, the precision and the memory, against all logits at once.

Over the whole vocabulary, and over the tokens that sampling kept.
"""

from typing import Any

import pytest
import torch

from grpo_ext.forward import tiled_log_probs as module
from grpo_ext.forward.lm_head import log_probs
from grpo_ext.forward.sampling_masks import SamplingMasks
from grpo_ext.forward.tiled_log_probs import LogitTransform
from tests.support.memory import LargestAllocation
from tests.support.selection import few_of
from tests.tolerances import FLOAT32_SUMS, FLOAT64_SUMS

TEMPERATURE = 0.9
TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=TEMPERATURE),
    "scale": LogitTransform(scale=0.3, temperature=TEMPERATURE),
    "cap": LogitTransform(cap=1.5, temperature=TEMPERATURE),
    "scale_and_cap": LogitTransform(scale=2.0, cap=1.5, temperature=TEMPERATURE),
    "fewer_tokens": LogitTransform(scale=2.0, cap=1.5, temperature=TEMPERATURE, vocabulary=9),
}


@pytest.fixture(params=[(64, 64), (3, 4)], ids=["one tile", "several"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(module, "CPU_TILE", request.param)


@pytest.fixture(params=few_of([(64, 64), (3, 4)], [(3, 4)]), ids=["one tile", "several"])
def tiles_of_gradcheck(request, monkeypatch):
    """The same where a derivative is tried out input by input."""
    monkeypatch.setattr(module, "CPU_TILE", request.param)


def naive(
    hidden: Any, weight: Any, bias: Any, targets: Any, transform: LogitTransform, kept: Any = None
) -> tuple[Any, Any]:
    """Log-probabilities and entropies by way of all logits, or of those that a mask keeps."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    logits = logits[:, : transform.vocabulary] / transform.temperature
    logps = (logits if kept is None else logits.masked_fill(~kept, -torch.inf)).log_softmax(-1)
    entropies = -(logps.exp() * logps.masked_fill(logps.isinf(), 0)).sum(-1)
    return logps.gather(1, targets[:, None])[:, 0], entropies


def case(dtype: torch.dtype = torch.float64, rows: int = 7, hidden: int = 5, vocabulary: int = 11, seed: int = 0):
    """Hidden states, weight, bias and targets."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, 9, (rows,), generator=source)
    return draw(rows, hidden), draw(vocabulary, hidden), draw(vocabulary), targets


def gradients(score: Any, inputs: tuple[Any, ...], transform: LogitTransform, entropy: float = 0.3) -> list[Any]:
    logps, entropies = score(*inputs, transform)
    weights = torch.linspace(-0.5, 1.5, logps.numel(), dtype=logps.dtype)
    loss = (weights * logps).sum() + entropy * (weights.flip(0) * entropies).sum()
    return list(torch.autograd.grad(loss, [x for x in inputs[:3] if x is not None and x.requires_grad]))


# ---- The algebra ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiles_of_gradcheck")
@pytest.mark.parametrize("with_bias", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(  # each output alone, and both
    "pick", [slice(0, 2), *(pytest.param(slice(i, i + 1), marks=pytest.mark.full) for i in (0, 1))], ids=str
)
@pytest.mark.parametrize("kind", few_of(TRANSFORMS, ("scale_and_cap", "fewer_tokens")))
def test_the_backward_pass_is_the_derivative_of_the_forward(kind, pick, with_bias):
    hidden, weight, bias, targets = case()
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)

    def score(h: Any, w: Any, b: Any = None) -> Any:
        return log_probs(h, w, b, targets, TRANSFORMS[kind])[pick]

    assert torch.autograd.gradcheck(score, inputs)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FLOAT64_SUMS), (torch.float32, FLOAT32_SUMS)])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_scores_and_gradients_are_those_of_all_logits(kind, dtype, tolerance):
    inputs, transform = case(dtype), TRANSFORMS[kind]
    ours, theirs = log_probs(*inputs, transform), naive(*inputs, transform)
    pairs = [*zip(ours, theirs), *zip(gradients(log_probs, inputs, transform), gradients(naive, inputs, transform))]
    for a, b in pairs:
        assert a.dtype == dtype
        assert (a - b).norm() <= tolerance * b.norm().clamp(min=1)


@pytest.mark.usefixtures("tiles")
def test_entropies_and_log_probabilities_keep_their_digits_where_logits_are_large():
    hidden, weight, bias, targets = case(torch.float32)
    bias = (bias + 500).detach()
    exact = naive(hidden.double(), weight.double(), bias.double(), targets, LogitTransform())
    for ours, theirs in zip(log_probs(hidden, weight, bias, targets, LogitTransform()), exact):
        assert (ours - theirs).abs().max() < 500 * 2**-22  # a logit's last digit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_in_half_precision_and_under_autocast(dtype):
    hidden, weight, bias, targets = case(torch.float32, rows=40, hidden=32, vocabulary=300)
    inputs = (hidden, weight, bias, targets)
    exact, right = naive(*inputs, LogitTransform()), gradients(naive, inputs, LogitTransform())
    with torch.autocast("cpu", dtype):
        scores, grads = log_probs(*inputs, LogitTransform()), gradients(log_probs, inputs, LogitTransform())
    halves = [x.detach().to(dtype) for x in (hidden, weight, bias)]
    for ours in (scores, log_probs(*halves, targets, LogitTransform())):
        assert {x.dtype for x in ours} == {torch.float32}
        # products carry 8 or 11 bits
        assert max(float((a - b).detach().abs().max()) for a, b in zip(ours, exact)) < 0.2
    for a, b in zip(grads, right):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


def test_gradients_of_half_precision_weights_are_summed_in_float32():
    """A thousand tokens that each add 2**-9 to a gradient; bfloat16 sums stop at 1."""
    rows, unit = 1024, 2.0**-8
    hidden = torch.full((rows, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logps, _ = log_probs(hidden, weight, None, torch.zeros(rows, dtype=torch.long), LogitTransform())
    (logps * unit).sum().backward()
    assert weight.grad[0].item() == rows * unit / 2


def test_no_tensor_has_the_size_of_all_logits(monkeypatch):
    monkeypatch.setattr(module, "CPU_TILE", (16, 32))
    inputs = case(torch.float32, rows=100, hidden=4, vocabulary=500)
    with LargestAllocation() as ours:
        gradients(log_probs, inputs, TRANSFORMS["scale_and_cap"])
    with LargestAllocation() as theirs:
        gradients(naive, inputs, TRANSFORMS["scale_and_cap"])
    assert ours.bytes <= 4 * 500 * 4  # the gradient of the weight
    assert theirs.bytes >= 4 * 100 * 500


def test_a_row_is_summed_over_the_same_columns_whatever_runs_beside_it():
    """Else the rounding of a log-probability, and of the gradient below it, follows from the micro-batch."""

    def columns(rows: int) -> list[tuple[int, int]]:
        hidden, weight = torch.zeros(rows, 2), torch.zeros(5000, 2)
        tiles = module._Tiles(hidden, weight, None, LogitTransform(), torch.float32, spare=0)
        return list(dict.fromkeys((c.start, c.stop) for _, c, _ in tiles))

    assert len(columns(1)) > 1
    assert columns(1) == columns(100) == columns(1500)


# ---- Of the tokens that sampling kept -------------------------------------------------------------------------------

COUNTS = torch.tensor([3, 1, 0, -1, 2, -2, 4], dtype=torch.int32)
IDS = torch.tensor([0, 5, 9, 7, 1, 10, 2, 3, 4, 8], dtype=torch.int32)
TARGETS = torch.tensor([5, 7, 3, 0, 10, 1, 8])
SUPPRESSED = (torch.tensor([4]), torch.tensor([4, 9]))


def masks() -> SamplingMasks:
    return SamplingMasks.of(COUNTS, IDS, SUPPRESSED)


def kept() -> torch.Tensor:
    """The same, as one mask (7, 11) written by hand."""
    rows = [[0, 5, 9], [7], range(11), set(range(11)) - {4}, [1, 10], set(range(11)) - {4, 9}, [2, 3, 4, 8]]
    return torch.tensor([[token in row for token in range(11)] for row in rows])


@pytest.mark.usefixtures("tiles_of_gradcheck")
@pytest.mark.parametrize("kind", ["temperature", "scale_and_cap"])
@pytest.mark.full
def test_probabilities_entropies_and_derivatives_are_those_over_the_kept_tokens(kind):
    inputs, transform = case()[:3], TRANSFORMS[kind]
    logps, entropies = log_probs(*inputs, TARGETS, transform, masks=masks())
    expected = naive(*inputs, TARGETS, transform, kept())
    assert torch.allclose(logps, expected[0], rtol=0, atol=FLOAT64_SUMS)
    assert torch.allclose(entropies, expected[1], rtol=0, atol=FLOAT64_SUMS)
    everything, _ = log_probs(*inputs, TARGETS, transform)  # the control: without masks
    assert [bool(same) for same in (everything - logps).abs() < 1e-6] == [False, False, True, *[False] * 4]
    # and the backward pass is the derivative
    assert torch.autograd.gradcheck(lambda *inputs: log_probs(*inputs, TARGETS, transform, masks=masks()), inputs)
