"""TRL's Triton head, which every run on a GPU takes, against float64 and beside the tiled head of this package.

In a rehearsal TRL's head runs its torch form. Shapes: S tokens, H hidden size, V vocabulary.
"""

from typing import Any

import pytest
import torch

from grpo_ext.compat import triton_head
from grpo_ext.forward import lm_head
from grpo_ext.forward.tiled_log_probs import LogitTransform, TiledLogProbs
from tests.support.gpu import DEVICE, TOY, needs_gpu
from tests.tolerances import DIFFERENT, FLOAT32_HEAD, HALF_PRECISION_KERNEL

pytestmark = [pytest.mark.gpu, needs_gpu]
# more than two blocks of the vocabulary, the last one odd; and more rows than TRL takes at a time (4096)
VOCABULARY, HIDDEN, ROWS = (301, 32, 45) if TOY else (70001, 256, 4500)
COLUMNS = 128 if TOY else lm_head._KERNEL_COLUMNS
TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=0.7),
    "scale": LogitTransform(scale=0.3, temperature=1.3),
    "soft cap": LogitTransform(cap=3.0),
    "all": LogitTransform(scale=0.7, cap=5.0, temperature=0.9),
}
# types of hidden states and weight; under autocast products are of bfloat16; `cast_lm_head_to_fp32` widens the states
PRECISIONS = {
    "float32": (torch.float32, torch.float32, False),
    "bfloat16": (torch.bfloat16, torch.bfloat16, False),
    "float16": (torch.float16, torch.float16, False),
    "autocast": (torch.float32, torch.float32, True),
    "cast": (torch.bfloat16, torch.float32, False),
}
Tensors = list[torch.Tensor]


def by_kernel(hidden: Any, weight: Any, bias: Any, targets: Any, how: LogitTransform) -> tuple[torch.Tensor, ...]:
    if not TOY:
        return lm_head.log_probs(hidden, weight, bias, targets, how)
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    settings = (how.temperature, COLUMNS, how.cap, how.scale, ("entropy",))
    return ChunkedLogProbFunction.apply(hidden, weight, bias, targets, *settings)[:2]


def dense(hidden: Any, weight: Any, bias: Any, targets: Any, how: LogitTransform) -> tuple[torch.Tensor, ...]:
    logits = (hidden @ weight.T + (0 if bias is None else bias)) * how.scale
    logits = logits if how.cap is None else how.cap * torch.tanh(logits / how.cap)
    log_p = torch.log_softmax(logits / how.temperature, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def inputs_of(precision: str, rows: int, with_bias: bool) -> tuple[Tensors, torch.Tensor]:
    of_hidden, of_weight, _ = PRECISIONS[precision]
    drawn: Any = {"generator": torch.Generator(DEVICE).manual_seed(rows), "device": DEVICE}
    hidden = torch.randn(rows, HIDDEN, **drawn).to(of_hidden)
    weight = (0.1 * torch.randn(VOCABULARY, HIDDEN, **drawn)).to(of_weight)
    bias = torch.randn(VOCABULARY, **drawn).to(of_weight) if with_bias else None
    targets = torch.randint(VOCABULARY, (rows,), **drawn)
    return [hidden.to(of_weight), weight, *([] if bias is None else [bias])], targets


def outcome(head: Any, states: Tensors, targets: torch.Tensor, how: LogitTransform, entropy_only: bool) -> Tensors:
    """Log-probabilities, entropies, and the gradients of both: of hidden states, weight and bias."""
    leaves = [x.detach().requires_grad_() for x in states]
    bias = leaves[2] if len(leaves) > 2 else None
    logps, entropies = head(leaves[0], leaves[1], bias, targets, how)
    up = torch.linspace(-1, 1, len(targets), device=logps.device).to(logps.dtype)
    loss = (entropies * up.flip(0)).sum() + (0 if entropy_only else (logps * up).sum())
    return [logps.detach(), entropies.detach(), *torch.autograd.grad(loss, leaves)]


def tiled(*inputs: Any) -> tuple[torch.Tensor, ...]:
    return TiledLogProbs.apply(*inputs, True, None)


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("entropy_only", [False, True])
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_head_gives_the_values_and_gradients_of_float64(
    record_property, precision, transform, with_bias, rows, entropy_only
):
    states, targets = inputs_of(precision, rows, with_bias)
    how, autocast = TRANSFORMS[transform], PRECISIONS[precision][2]
    exact = outcome(dense, [x.double() for x in states], targets, how, entropy_only)
    errors = {}
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        for name, head in (("Triton", by_kernel), ("tiled", tiled)):
            errors[name] = list(map(error, outcome(head, states, targets, how, entropy_only), exact))
    if rows > 1 and not entropy_only:
        record_property("errors of log-probs, entropies, gradients", errors)
    bound = FLOAT32_HEAD if precision in ("float32", "cast") else HALF_PRECISION_KERNEL
    assert all(one <= bound for both in errors.values() for one in both), errors


def test_another_temperature_is_seen():
    states, targets = inputs_of("float32", ROWS, True)
    exact = outcome(dense, [x.double() for x in states], targets, LogitTransform(temperature=0.9), False)
    other = outcome(by_kernel, states, targets, LogitTransform(), False)
    assert min(map(error, other, exact)) > DIFFERENT


@pytest.mark.skipif(TOY, reason="log_probs takes TRL's kernel on CUDA alone")
def test_log_probs_take_trls_kernel(monkeypatch):
    assert triton_head() is not None
    calls = []
    monkeypatch.setattr(lm_head, "triton_head", lambda: lambda *given: calls.append(given) or triton_head()(*given))
    states, targets = inputs_of("bfloat16", 5, False)
    lm_head.log_probs(*states, None, targets, LogitTransform())
    assert len(calls) == 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_kernel_repeats_its_bits(precision):
    """What its source says, without atomics and without a choice by timing; bitwise mode does not rest on it."""
    states, targets = inputs_of(precision, ROWS, False)
    one, other = (outcome(by_kernel, states, targets, TRANSFORMS["all"], False) for _ in range(2))
    assert all(map(torch.equal, one, other))
    states[0][-1] *= 1.01
    assert not any(map(torch.equal, one, outcome(by_kernel, states, targets, TRANSFORMS["all"], False)))
