"""The packed forward gives the log-probabilities, entropies, router counts and gradients of the padded one."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.mistral import modeling_mistral

from grpo_ext.batching.packing import PackLayout
from grpo_ext.forward import attention
from grpo_ext.forward.attention import PackRefused, packed_attention
from grpo_ext.forward.forms import run_rows, why_not_packed
from grpo_ext.forward.rows import TokenRows
from tests.support import packs
from tests.support.packs import FLOAT32, MODELS, SHAPES, apart, gradient, model_of, rows_of
from tests.support.tiny import tiny_model
from tests.support.varlen import layout_of, states_of
from tests.tolerances import FLOAT64_SUMS, SAME_ALGEBRA, UPDATE


def pairs() -> Iterator[Any]:
    """Models and shapes: each of them in `make test`."""
    for kind, shape in itertools.product(MODELS, SHAPES):
        if shape == "groups" or kind in ("qwen2", "gemma3"):
            marks = () if shape == "groups" or kind == "gemma3" else pytest.mark.full
            yield pytest.param(kind, shape, marks=marks)


@pytest.mark.parametrize("split", [True, False], ids=["segments", "dense"])
@pytest.mark.parametrize(("kind", "shape"), pairs())
def test_a_pack_gives_the_same_scores_and_gradients(monkeypatch, kind, shape, split):
    monkeypatch.setattr(attention, "_CALL_COST", 0 if split else 10**9)
    model = model_of(kind)
    assert why_not_packed(model) is None
    tolerance = UPDATE if kind in FLOAT32 else FLOAT64_SUMS if kind == "gpt2" else SAME_ALGEBRA
    packs.assert_same_as_padded("packed", model, rows_of(*SHAPES[shape]), tolerance)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_runs_the_same_pack_again(reentrant):
    model, batch = model_of("llama"), rows_of(*SHAPES["groups"])
    expected = gradient("padded", model, batch)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert apart(gradient("packed", model, batch), expected) <= SAME_ALGEBRA


def test_the_router_counts_what_the_padded_batch_counts():
    packs.assert_same_router_counts("packed", model_of("moe"), rows_of(*SHAPES["masked_out"]))


def test_a_model_that_drops_the_layout_is_refused():
    model, batch = model_of("qwen2"), rows_of(*SHAPES["groups"])
    forward = model.model.forward
    model.model.forward = lambda *args, grpo_ext_pack=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(PackRefused, match="is not given the layout"):
        run_rows("packed", model, batch)


def test_a_model_that_makes_its_own_mask_is_refused_where_its_window_does_not_show(monkeypatch):
    model, batch = model_of("mistral"), rows_of([2], [[2, 2]])  # a window of 6
    run_rows("packed", model, batch)
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", lambda *args, **kwargs: mask)
    with pytest.raises(PackRefused, match="MistralAttention uses a mask that the model builds"):
        run_rows("packed", model, batch)


def test_a_group_is_attended_to_alike_whatever_runs_beside_it(monkeypatch):
    """Else its rounding would follow from the micro-batch: one neighbour decided for all."""
    model, small, large = tiny_model("qwen2"), (16, [12] * 8), (64, [300] * 8)
    layer, both = model.model.layers[0].self_attn, layout_of([small, large])
    states = states_of(both, (model.config.num_attention_heads, model.config.num_key_value_heads))

    def attended(layout: PackLayout) -> torch.Tensor:
        inputs, options = (x[:, :, : layout.tokens] for x in states), {attention.LAYOUT: layout}
        with packed_attention(model):
            return attention.packed_attention_forward(layer, *inputs, None, **options)[0][:, : 16 + 12 * 8]

    alone = attended(layout_of([small]))
    assert torch.equal(alone, attended(both))
    monkeypatch.setattr(attention, "split_is_cheaper", lambda *group: True)
    assert not torch.equal(alone, attended(both))


def test_in_half_precision_a_part_of_a_group_is_attended_to_as_in_the_whole_group():
    model, lengths = model_of("qwen2").float(), (16,) * 8
    rows = rows_of([20], [list(lengths)])

    def scores(group_lengths_B: list[tuple[int, ...]] | None) -> torch.Tensor:
        known = replace(rows, group_lengths_B=group_lengths_B)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            parts = [run_rows("packed", model, known.part(range(n, n + 2))) for n in range(0, 8, 2)]
        return torch.cat([part.logps_S for part in parts])

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = run_rows("packed", model, rows).logps_S
    assert torch.equal(scores([lengths] * 8), whole)
    assert not torch.equal(scores(None), whole)


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_go_to_trls_layout_and_back(shape, multiple):
    rows = rows_of(*SHAPES[shape])
    ids, mask, width = rows.padded(multiple)
    assert width % multiple == 0
    assert (ids.size(1) - width) % multiple == 0
    back = TokenRows.of_padded(ids, mask, width)
    assert torch.equal(back.ids_N, rows.ids_N)
    assert (back.prompts_B, back.completions_B) == (list(rows.prompts_B), list(rows.completions_B))
    assert back.same_prompt == rows.same_prompt
    assert torch.equal(rows.in_columns(rows.targets(), width), ids[:, -width:])
