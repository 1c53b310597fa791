"""The attention of a pack in two calls (on CUDA), through torch's operators in plain arithmetic.

The operators themselves run in tests/gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_ext.forward import attention
from grpo_ext.forward.forms import run_rows
from grpo_ext.forward.lm_head import install
from tests.support import varlen
from tests.support.architectures import architecture
from tests.support.packs import SHAPES, apart, gradient, rows_of
from tests.support.varlen import HEADS, PACKS, SCALE, dense, layout_of, outcome, states_of
from tests.tolerances import FLOAT64_SUMS, SAME_ALGEBRA


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Packs run as they do on CUDA; which operators were called."""
    monkeypatch.setattr(attention, "_takes_varlen", lambda *states: True)
    return varlen.count_calls(monkeypatch, varlen.forward, varlen.backward)


def model_of(kind: str, **settings: Any) -> Any:
    model = architecture(kind, initializer_range=0.3, **settings).double()
    install(model, 0.9)
    return model


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("pack", PACKS)
def test_two_calls_give_the_masked_attention_and_its_gradients(calls, pack, heads):
    layout = layout_of(PACKS[pack])
    states = states_of(layout, heads)
    parts = attention._joint_parts(layout, states[0].device)
    ours = outcome(attention._SharedPrefixAttention.apply(*states, parts, SCALE), states)
    for found, expected in zip(ours, outcome(dense(layout, *states), states)):
        torch.testing.assert_close(found, expected, rtol=FLOAT64_SUMS, atol=FLOAT64_SUMS)
    once = 1 if pack == "prompts alone" else 2
    assert calls == ["_varlen"] * once + ["_varlen_backward"] * once


def test_gradients_of_the_parts_alone_would_be_wrong(calls):
    """The negative control: each part with its own output and log-sum-exp, as autograd would compute them."""
    layout = layout_of(PACKS["ragged"])
    states = states_of(layout, HEADS[0])
    own, _ = attention._joint_parts(layout, states[0].device)
    alone = outcome(attention._SharedPrefixAttention.apply(*states, [own], SCALE), states)
    expected = outcome(dense(layout, *states), states)
    assert (alone[1] - expected[1]).norm() > 0.05 * expected[1].norm()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_torchs_own_operators_take_the_arguments(heads):
    """Their shapes without arithmetic: a version that took other arguments or kept the log-sum-exp otherwise shows."""
    layout = layout_of(PACKS["ragged"])
    states = states_of(layout, heads, device="meta", dtype=torch.bfloat16)
    parts = attention._joint_parts(layout, torch.device("meta"))
    assert [part.causal for part in parts] == [True, False]
    out = attention._SharedPrefixAttention.apply(*states, parts, SCALE)
    assert out.shape == states[0].shape
    for x, grad in zip(states, torch.autograd.grad(out.sum(), states)):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("shape", ["groups", "masked_out", "one"])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_a_model_scores_and_learns_as_on_the_padded_batch(calls, kind, shape):
    model, batch = model_of(kind), rows_of(*SHAPES[shape])
    assert apart(run_rows("packed", model, batch).logps_S, run_rows("padded", model, batch).logps_S) <= SAME_ALGEBRA
    assert len(calls) == 2 * model.config.num_hidden_layers
    assert apart(gradient("packed", model, batch), gradient("padded", model, batch)) <= SAME_ALGEBRA


def test_gradient_checkpointing_runs_the_same_calls_again(calls):
    model, batch = model_of("llama"), rows_of(*SHAPES["groups"])
    expected = gradient("padded", model, batch)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert apart(gradient("packed", model, batch), expected) <= SAME_ALGEBRA
    assert (calls.count("_varlen"), calls.count("_varlen_backward")) == (16, 8)


@pytest.mark.parametrize(("window", "expected"), [(6, 0), (100, 8)])
def test_a_window_that_a_sequence_reaches_keeps_the_masked_calls(calls, window, expected):
    model, batch = model_of("mistral", sliding_window=window), rows_of(*SHAPES["groups"])
    assert apart(run_rows("packed", model, batch).logps_S, run_rows("padded", model, batch).logps_S) <= SAME_ALGEBRA
    assert len(calls) == expected
