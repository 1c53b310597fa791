"""The attention of a pack in two calls (on CUDA), through torch's operators in plain arithmetic.

The operators themselves run in tests/gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from grpo_ext.batching.packing import PackLayout
from grpo_ext.forward import attention
from grpo_ext.forward.forms import run_rows
from grpo_ext.forward.lm_head import install
from tests.support import varlen
from tests.support.packs import gradient, rows_of
from tests.support.tiny import tiny_model
from tests.support.varlen import HEADS, PACKS, SCALE, dense, layout_of, outcome, states_of
from tests.tolerances import FLOAT64_SUMS, SAME_ALGEBRA

ROWS = {
    "ragged": ([7, 12, 3], [[4, 1, 9], [6, 6, 2], [11, 3, 5]]),
    "empty": ([6, 4], [[5, 0, 3], [0, 0, 2]]),
    "one": ([9], [[7]]),
}


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Packs run as they do on CUDA; which operators were called."""
    monkeypatch.setattr(attention, "_takes_varlen", lambda *states: True)
    return varlen.count_calls(monkeypatch, varlen.forward, varlen.backward)


def by_autograd(layout: PackLayout, *states: torch.Tensor, told: bool) -> torch.Tensor:
    """The two calls joined by autograd, through operators whose backward is told the log-sum-exp's gradient or not."""
    rows = [x[0].transpose(0, 1) for x in states]
    own, seen = attention._joint_parts(layout, states[0].device)
    out, lse = varlen.ByAutograd.apply(*rows, own.bounds, True, SCALE, told)
    parts = rows[0][seen.queries], rows[1][seen.keys], rows[2][seen.keys]
    other, other_lse = varlen.ByAutograd.apply(*parts, seen.bounds, False, SCALE, told)
    share = torch.sigmoid(other_lse - lse[:, seen.queries]).T[..., None]
    joined = out.clone()
    joined[seen.queries] = torch.lerp(out[seen.queries], other, share)
    return joined.transpose(0, 1)[None]


def model_of(kind: str) -> Any:
    """A tiny model; with a sliding window, a Mistral."""
    if kind not in ("qwen2", "llama", "gpt2"):
        torch.manual_seed(1)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
        config = MistralConfig(**sizes, **heads, sliding_window=100 if kind == "window_larger" else 6)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    else:
        model = tiny_model(kind).double()
    install(model, 0.9)
    return model


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).norm() <= SAME_ALGEBRA * theirs.norm()


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


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("pack", [pack for pack in PACKS if pack != "prompts alone"])
def test_joining_by_autograd_would_give_wrong_gradients(pack, heads):
    layout = layout_of(PACKS[pack])
    states = states_of(layout, heads)
    expected = outcome(dense(layout, *states), states)
    told, untold = (outcome(by_autograd(layout, *states, told=told), states) for told in (True, False))
    for found, right in zip(told, expected):
        torch.testing.assert_close(found, right, rtol=FLOAT64_SUMS, atol=FLOAT64_SUMS)
    torch.testing.assert_close(untold[0], expected[0], rtol=FLOAT64_SUMS, atol=FLOAT64_SUMS)
    assert (untold[1] - expected[1]).norm() > 0.05 * expected[1].norm()


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


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "window_larger"])
def test_a_model_scores_and_learns_as_on_the_padded_batch(calls, kind, shape):
    model, batch = model_of(kind), rows_of(*ROWS[shape])
    assert_same(run_rows("packed", model, batch).logps_S, run_rows("padded", model, batch).logps_S)
    assert len(calls) == 2 * model.config.num_hidden_layers
    assert_same(gradient("packed", model, batch), gradient("padded", model, batch))


def test_gradient_checkpointing_runs_the_same_calls_again(calls):
    model, batch = model_of("llama"), rows_of(*ROWS["ragged"])
    expected = gradient("padded", model, batch)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(gradient("packed", model, batch), expected)
    assert (calls.count("_varlen"), calls.count("_varlen_backward")) == (8, 4)


def test_a_window_keeps_the_masked_calls(calls):
    model, batch = model_of("window"), rows_of(*ROWS["ragged"])
    assert_same(run_rows("packed", model, batch).logps_S, run_rows("padded", model, batch).logps_S)
    assert calls == []
