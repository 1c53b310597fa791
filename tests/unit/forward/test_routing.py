"""The experts of a forward are recorded and replayed, in every form and for every kind of router."""

from typing import Any

import pytest
import torch
from torch import nn

from grpo_ext.errors import ModelError
from grpo_ext.forward.columns import EXPERTS
from grpo_ext.forward.forms import in_form, run_rows, why_no_prefix, why_not_packed
from grpo_ext.forward.routing import BY_ROUTER, Routing, install_routers
from tests.support.architectures import architecture
from tests.support.packs import SHAPES, apart, gradient, rows_of, scoring
from tests.support.selection import few_of
from tests.tolerances import DIFFERENT, FLOAT32_SUMS

KINDS = ("mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "olmoe", "glm4_moe", "llama4_text")


def model_of(kind: str) -> Any:
    model = scoring(kind, initializer_range=0.04)
    install_routers(model)
    return model.train()


def others(experts_NC: torch.Tensor, number: int) -> torch.Tensor:
    """Other experts for every token, the same ones for equal tokens of equal prompts."""
    return torch.where(experts_NC == BY_ROUTER, experts_NC, (experts_NC + 1) % number)


def experts_in(model: Any) -> int:
    return next(m.num_experts for m in model.modules() if hasattr(m.forward, "of_grpo_ext") and hasattr(m, "top_k"))


def forms_of(model: Any) -> list[Any]:
    reasons = {"padded": None, "prefix": why_no_prefix(model), "packed": why_not_packed(model)}
    return [form for form, reason in reasons.items() if reason is None]


@pytest.mark.parametrize("kind", few_of(KINDS, {*KINDS} - {"qwen3_next", "deepseek_v3"}))
def test_every_form_records_and_replays_the_experts_of_the_same_tokens(kind):
    model, rows = model_of(kind), rows_of(*SHAPES["groups"])
    reference = run_rows("padded", model, rows, with_router=True, record_experts=True).experts_NC
    live, same = run_rows("padded", model, rows), run_rows("padded", model, rows.having(EXPERTS, reference))
    assert torch.equal(live.logps_S, same.logps_S)
    assert (reference.dtype, int(same.routing.counts()[0])) == (torch.int8, 0)
    swapped = others(reference, experts_in(model))
    swapped[[stop - 1 for stop in rows.starts_B[1:]]] = BY_ROUTER  # the last tokens, which a pack leaves out
    swapped = rows.having(EXPERTS, swapped)
    expected, expected_gradient = run_rows("padded", model, swapped), gradient("padded", model, swapped)
    assert apart(live.logps_S, expected.logps_S) > DIFFERENT  # the control
    assert len(forms_of(model)) > 1
    shared = sum(tokens for tokens, same in zip(rows.prompts_B[1:], rows.same_prompt) if same)
    for form in forms_of(model):
        recorded = run_rows(form, model, rows, with_router=True, record_experts=True, multiple=4).experts_NC
        ran_N = recorded[:, 0] != BY_ROUTER
        assert torch.equal(recorded[ran_N], reference[ran_N]), form
        assert int((~ran_N).sum()) == (0 if form == "padded" else shared)
        replayed = run_rows(form, model, swapped)
        assert apart(replayed.logps_S, expected.logps_S) <= FLOAT32_SUMS, form
        counts = [output.routing.counts() for output in (replayed, expected)]
        assert torch.equal(*counts), form
        assert 0 < counts[0][0] <= counts[0][1]
        assert apart(gradient(form, model, swapped), expected_gradient) <= FLOAT32_SUMS, form


@pytest.mark.parametrize(
    ("kind", "reentrant"),
    [
        pytest.param("qwen3_moe", False, marks=pytest.mark.full),
        pytest.param("qwen3_moe", True, marks=pytest.mark.full),
        pytest.param("deepseek_v3", False, marks=pytest.mark.full),
        ("deepseek_v3", True),
    ],
)
def test_recomputation_under_checkpointing_replays_too(kind, reentrant):
    model, rows = model_of(kind), rows_of(*SHAPES["groups"])
    reference = run_rows("padded", model, rows, with_router=True, record_experts=True).experts_NC
    swapped = rows.having(EXPERTS, others(reference, experts_in(model)))
    forms = [form for form in forms_of(model) if form != "prefix" or not reentrant]
    expected = {form: gradient(form, model, swapped) for form in forms}
    counts = {form: int(run_rows(form, model, swapped).routing.counts()[0]) for form in forms}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    for form in forms:
        assert apart(gradient(form, model, swapped), expected[form]) <= FLOAT32_SUMS, form
        assert apart(gradient(form, model, rows), expected[form]) > DIFFERENT  # the control
        output = run_rows(form, model, swapped)
        with in_form(model, form):
            output.logps_S.sum().backward()
        assert int(output.routing.counts()[0]) == counts[form]  # the recomputation is not counted


def test_the_router_learns_though_its_choice_is_replayed():
    model, rows = model_of("qwen3_moe"), rows_of(*SHAPES["groups"])
    recorded = run_rows("padded", model, rows, with_router=True, record_experts=True).experts_NC
    live, replayed = gradient("packed", model, rows), gradient("packed", model, rows.having(EXPERTS, recorded))
    assert torch.equal(live, replayed)  # where no choice changes
    gradient("packed", model, rows.having(EXPERTS, others(recorded, 4)))
    assert all(p.grad.norm() > 0 for name, p in model.named_parameters() if name.endswith("gate.weight"))


def test_an_unknown_router_is_refused_by_name():
    model = architecture("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate = nn.Identity()
    with pytest.raises(ModelError, match=r"routing_replay=True does not know.*top_k and num_experts"):
        install_routers(model)


def test_a_router_that_gives_replayed_experts_no_weight_is_refused():
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16}
    sizes |= {"n_routed_experts": 8, "moe_intermediate_size": 16, "num_key_value_heads": 4, "n_group": 4}
    sizes |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
    install_routers(architecture("deepseek_v2", topk_group=1, topk_method="greedy", **sizes))
    with pytest.raises(ModelError, match="DeepseekV2TopkRouter gives no weight to experts outside the groups"):
        install_routers(architecture("deepseek_v2", topk_group=1, topk_method="group_limited_greedy", **sizes))


def test_a_forward_that_leaves_out_its_routers_is_refused():
    with pytest.raises(ModelError, match="without its routers"):
        Routing().pop_experts()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_the_load_balancing_loss_counts_the_experts_that_are_used(kind):
    model, rows = model_of(kind), rows_of(*SHAPES["groups"])
    number, real_N = experts_in(model), rows.padded(1)[1].flatten().bool()
    recorded_NC = run_rows("padded", model, rows, with_router=True, record_experts=True).experts_NC
    swapped_NC = others(recorded_NC, number)
    some_NC = swapped_NC.clone()
    some_NC[[stop - 1 for stop in rows.starts_B[1:]]] = BY_ROUTER  # whose experts the routers choose
    used: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("experts"):
            module.register_forward_hook(lambda module, args, output: used.append(args[1][real_N].flatten()))
    counts = []
    for experts_NC in (None, recorded_NC, swapped_NC, some_NC):
        replayed = rows.having(EXPERTS, experts_NC)
        used.clear()
        counts.append(run_rows("padded", model, replayed, with_router=True).router.statistics()[0])
        assert torch.equal(counts[-1], torch.bincount(torch.cat(used), minlength=number).double())
    assert torch.equal(counts[0], counts[1])
    assert not torch.equal(counts[0], counts[2])  # the control
    assert not torch.equal(counts[2], counts[3])
