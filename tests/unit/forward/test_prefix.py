"""The prefix form gives the log-probabilities, entropies, router counts and gradients of the padded one."""

import functools
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_ext.compat import CACHE
from grpo_ext.forward import forms, prefix_cache
from grpo_ext.forward.form_check import RowsAlone, probe_rows, why_form_fails
from grpo_ext.forward.forms import run_rows, why_no_prefix, why_not_packed
from tests.support import packs
from tests.support.architectures import HYBRID, PREFIXED
from tests.support.float64 import float64_throughout
from tests.support.packs import SHAPES, apart, gradient, rows_of, scoring
from tests.support.selection import few_of
from tests.support.tiny import tiny_tokenizer
from tests.tolerances import FLOAT32_SUMS, FLOAT64_SUMS

ALWAYS = ("lfm2", "falcon_h1", "qwen3_5_text")  # convolutions, Mamba 2 and attention in a layer, linear attention
CHECKPOINTING = {"use_reentrant": False}


before_5_24 = pytest.mark.skipif(CACHE == "cache", reason="Mamba takes transformers' cache since 5.24")
EVERY = [(kind, shape) for kind in PREFIXED for shape in SHAPES]


def model_of(kind: str) -> Any:
    return scoring(kind).train()


@pytest.mark.parametrize(
    "case", few_of(EVERY, [(k, s) for k, s in EVERY if s == "groups" or k in ALWAYS[::2]]), ids=str
)
def test_the_same_scores_and_gradients(case):
    model = model_of(case[0])
    assert why_no_prefix(model) is None
    packs.assert_same_as_padded("prefix", model, rows_of(*SHAPES[case[1]]), FLOAT32_SUMS)


@pytest.mark.parametrize("kind", few_of([kind for kind in PREFIXED if kind != "gpt2"], (*ALWAYS, "nemotron_h")))
def test_the_same_gradients_under_checkpointing(kind, caplog):
    model, batch = model_of(kind), rows_of(*SHAPES["groups"])
    expected = gradient("padded", model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
    assert apart(gradient("prefix", model, batch), expected) <= FLOAT32_SUMS
    assert "incompatible" not in caplog.text
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    assert layers
    assert not any(layer._can_checkpoint_with_cache for layer in layers)  # put back


@pytest.mark.parametrize("kind", PREFIXED)
@pytest.mark.full
def test_in_float64_throughout_nothing_but_its_rounding_is_left(kind):
    """What float32 shows is rounding, then: of the prefix form, of packs, and under checkpointing."""
    batch = rows_of(*SHAPES["groups"])
    with float64_throughout(model_of(kind)) as model:
        expected = gradient("padded", model, batch)
        for form in ("prefix", "packed")[: 1 + (why_not_packed(model) is None)]:
            assert apart(gradient(form, model, batch), expected) <= FLOAT64_SUMS
        if kind != "gpt2":  # drops the cache there, and pads
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
            assert apart(gradient("prefix", model, batch), expected) <= FLOAT64_SUMS


def test_the_router_counts_what_the_padded_batch_counts():
    packs.assert_same_router_counts("prefix", model_of("qwen3_next"), rows_of(*SHAPES["masked_out"]))


def test_adapters_and_widths():
    model = model_of("falcon_h1")
    adapter = LoraConfig(r=4, target_modules=["q_proj", "in_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped, batch = get_peft_model(model, adapter), rows_of(*SHAPES["groups"])
    expected = gradient("padded", wrapped, batch)
    assert apart(gradient("prefix", wrapped, batch), expected) <= FLOAT32_SUMS
    wide = run_rows("prefix", wrapped, batch, multiple=8).logps_S
    assert apart(wide, run_rows("padded", wrapped, batch).logps_S) <= FLOAT32_SUMS


def refusal(model: Any, checkpointing: Any = None) -> str | None:
    """Why a model does not run the prefix form: by its class, or because its modules disagree with padding."""
    if (reason := why_no_prefix(model, reentrant=bool(checkpointing and checkpointing["use_reentrant"]))) is not None:
        return reason
    with torch.no_grad():
        return why_form_fails("prefix", RowsAlone(model, rows_of(*SHAPES["long"])), checkpointing)


@pytest.mark.parametrize("precision", few_of([torch.float32, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize("kind", few_of(HYBRID, ALWAYS))
def test_hybrid_models_run_it(kind, precision):
    assert refusal(model_of(kind).to(precision), CHECKPOINTING) is None


@pytest.mark.parametrize(
    ("kind", "checkpointing", "words"),
    [
        ("jamba", None, "differ"),
        ("minimax", None, "cache"),
        pytest.param("mamba2", None, "past_key_values", marks=before_5_24),
        ("lfm2", {"use_reentrant": True}, "use_reentrant=True"),
        ("gpt2", CHECKPOINTING, "fails on completions after a cached prompt"),  # whose layers drop the cache
    ],
)
def test_models_that_cannot_run_it_say_why(kind, checkpointing, words):
    assert words in str(refusal(model_of(kind), checkpointing))


@functools.cache
def healthy(kind: str) -> tuple[Any, list[Any]]:
    """A model, and batches on which its prefix form is not refused."""
    model = model_of(kind)
    batches = [rows_of([20, 11], [[30, 2, 17, 9], [4, 8, 20, 3]]), *probe_rows(model, tiny_tokenizer())]
    assert [why_form_fails("prefix", RowsAlone(model, rows)) for rows in batches] == [None, None]
    return model, batches


@pytest.mark.parametrize("kind", few_of(["lfm2", "qwen3_5_text"], ["lfm2"]))
@pytest.mark.parametrize("fault", ["position", "neighbour", "padding"])
def test_a_planted_fault_is_found(monkeypatch, kind, fault):
    model, batches = healthy(kind)
    changes = {
        "position": lambda value: {"position_ids": value.position_ids + 1},
        "neighbour": lambda value: {"prompt_B": value.prompt_B.flip(0)},
        "padding": lambda value: {"attention_mask": torch.ones_like(value.attention_mask)},
    }

    def spoilt(**values: Any) -> Any:
        continuation = prefix_cache.Continuation(**values)
        vars(continuation).update(changes[fault](continuation))
        return continuation

    monkeypatch.setattr(forms, "Continuation", spoilt)
    assert None not in [why_form_fails("prefix", RowsAlone(model, rows)) for rows in batches]
