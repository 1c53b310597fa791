"""The attention of a pack in two calls (on CUDA), through torch's operators in plain arithmetic.

The operators themselves run in tests/gpu.
"""

import pytest
import torch

from grpo_ext.forward import attention, shared_prefix
from grpo_ext.forward.forms import run_rows
from grpo_ext.runtime.transfer import to_device
from tests.support import varlen
from tests.support.packs import SHAPES, apart, assert_same_as_padded, gradient, rows_of, scoring
from tests.support.varlen import HEADS, PACKS, SCALE, dense, layout_of, outcome, states_of
from tests.tolerances import FLOAT64_SUMS, HALF_PRECISION_JOIN, SAME_ALGEBRA


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Packs run as they do on CUDA; which operators were called."""
    monkeypatch.setattr(attention, "takes_varlen", lambda *states: True)
    return varlen.count_calls(monkeypatch, varlen.forward, varlen.backward)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 12])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("pack", PACKS)
def test_the_masked_attention_and_its_gradients(calls, pack, heads, window):
    """In one call with a window, else in one for the segments and one for completions on their prompts."""
    layout = layout_of(PACKS[pack])
    states = states_of(layout, heads)
    parts = shared_prefix.joint_parts(layout, window)
    ours = outcome(shared_prefix.SharedPrefixAttention.apply(*states, parts, SCALE), states)
    for values, expected in zip(ours, outcome(dense(layout, *states, window), states)):
        torch.testing.assert_close(values, expected, rtol=FLOAT64_SUMS, atol=FLOAT64_SUMS)
    each_way = 1 if window or pack == "prompts alone" else 2
    assert calls == ["_varlen"] * each_way + ["_varlen_backward"] * each_way


def test_gradients_of_the_parts_alone_would_be_wrong(calls):
    """The negative control: each part with its own output and log-sum-exp, as autograd would compute them."""
    layout = layout_of(PACKS["ragged"])
    states = states_of(layout, HEADS[0])
    segments, _ = shared_prefix.joint_parts(layout, None)
    alone = outcome(shared_prefix.SharedPrefixAttention.apply(*states, [segments], SCALE), states)
    expected = outcome(dense(layout, *states), states)
    assert (alone[1] - expected[1]).norm() > 0.05 * expected[1].norm()


@pytest.mark.parametrize(("window", "causal"), [(None, [True, False]), (5, [True])])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_torchs_own_operators_take_the_arguments(heads, window, causal):
    """Their shapes without arithmetic: a version that took other arguments or kept the log-sum-exp otherwise shows."""
    layout = layout_of(PACKS["ragged"])
    states = states_of(layout, heads, device="meta", dtype=torch.bfloat16)
    parts = to_device(shared_prefix.joint_parts(layout, window), "meta")
    assert [part.causal for part in parts] == causal
    out = shared_prefix.SharedPrefixAttention.apply(*states, parts, SCALE)
    assert out.shape == states[0].shape
    for x, grad in zip(states, torch.autograd.grad(out.sum(), states)):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize(
    ("kind", "settings", "shape", "layer_calls"),
    [
        *((kind, {}, shape, 2) for kind in ("qwen2", "gpt2") for shape in ("groups", "masked_out", "one")),
        ("mistral", {"sliding_window": 6}, "groups", 1),  # the kernel's own window
        ("mistral", {"sliding_window": 100}, "groups", 2),  # which no sequence reaches
    ],
)
def test_a_model_scores_and_learns_as_on_the_padded_batch(calls, kind, settings, shape, layer_calls):
    model, batch = scoring(kind, initializer_range=0.3, **settings).double(), rows_of(*SHAPES[shape])
    run_rows("packed", model, batch)
    assert len(calls) == layer_calls * model.config.num_hidden_layers
    assert_same_as_padded("packed", model, batch, FLOAT64_SUMS if kind == "gpt2" else SAME_ALGEBRA)


def test_layers_with_and_without_a_window_share_a_pack(calls):
    layers = ["sliding_attention", "full_attention"] * 2
    model = scoring("gemma3_text", initializer_range=0.3, sliding_window=6, layer_types=layers).double().train()
    batch = rows_of(*SHAPES["groups"])
    expected = gradient("padded", model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert apart(gradient("packed", model, batch), expected) <= SAME_ALGEBRA


def join_error(dtype: torch.dtype) -> float:
    """Of the output in half precision against float64, in units of its rounding, with kernels that round once."""
    errors, exact = [], []
    for groups in PACKS.values():
        layout = layout_of(groups)
        states = [x.detach() for x in states_of(layout, HEADS[0], dtype=dtype, dim=64)]
        parts = shared_prefix.joint_parts(layout, None)
        out = shared_prefix.SharedPrefixAttention.apply(*states, parts, SCALE)
        exact.append(dense(layout, *(x.double() for x in states)).flatten())
        errors.append(out.double().flatten() - exact[-1])
    return float(torch.cat(errors).norm() / torch.cat(exact).norm()) / torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_are_joined_in_float32(calls, monkeypatch, dtype):
    assert join_error(dtype) <= HALF_PRECISION_JOIN
    lerp = torch.lerp
    monkeypatch.setattr(torch, "lerp", lambda *states: lerp(*(x.to(dtype) for x in states)))
    assert join_error(dtype) > HALF_PRECISION_JOIN
