"""Weight gradients in float32 under autocast: parts of a batch add up to the whole, and nothing else changes.

Two micro-batches of whole groups run the same forward as one of both. So where their gradients differ by more than
float32's rounding, a gradient was rounded to half precision on its way to the parameter.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from grpo_ext.forward.architecture import base_model_of
from grpo_ext.forward.forms import in_form, run_rows, why_not_packed
from grpo_ext.forward.lm_head import install
from grpo_ext.forward.routing import install_routers
from grpo_ext.precision.weight_gradients import COVERED, float32_weight_gradients
from tests.support.architectures import PREFIXED, REFUSING, ROUTED, architecture
from tests.support.packs import rows_of
from tests.support.selection import few_of
from tests.support.tiny import TINY, tiny_model
from tests.support.trainers import LORA

PACKS = rows_of([7, 12, 3, 9], [[4, 1, 9], [6, 6, 2], [11, 3, 5], [7, 7, 2]])
OF_ONE_WIDTH = rows_of([8] * 4, [[6, 6, 6]] * 4)
SAME, ROUNDED = 3e-6, 1e-4  # relative difference of a parameter's gradients
# what stays rounded, by model: convolutions, and parameters that the model reads or casts itself
MAMBA = ("conv1d.weight", "conv1d.bias", "dt_bias")
LEFT_OUT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "mamba2"), MAMBA),
    "jamba": ("conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias"),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text", "qwen3_next"), ("linear_attn.conv1d.weight",)),
    "lfm2": ("conv.conv.weight",),
}

Gradients = dict[str, torch.Tensor]


def gradients(model: Any, cuts: list[tuple[int, int]], on: bool, dtype: Any = torch.bfloat16) -> Any:
    """Return log-probabilities, and the gradients summed over these micro-batches, by name."""
    base = base_model_of(model)
    packed = why_not_packed(base) is None
    form, rows = ("packed", PACKS) if packed else ("padded", OF_ONE_WIDTH)
    weights, logps = torch.linspace(0.5, 1.5, sum(rows.completions_B)), []
    model.zero_grad()
    with float32_weight_gradients(base) if on else nullcontext(), in_form(base, form):  # type: ignore[arg-type]
        for start, end in cuts:
            with torch.autocast("cpu", dtype):
                output = run_rows(form, model, rows.part(range(start, end)))  # type: ignore[arg-type]
            weight, weights = weights.split([len(output.logps_S), len(weights) - len(output.logps_S)])
            (weight * (output.logps_S + 0.3 * output.entropies_S)).sum().backward()
            logps.append(output.logps_S.detach())
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    return torch.cat(logps), found


def apart(one: Gradients, other: Gradients) -> dict[str, float]:
    return {name: float((one[name] - other[name]).norm() / one[name].norm()) for name in one if one[name].any()}


def assert_parts_add_up(model: Any, left_out: tuple[str, ...] = (), dtype: Any = torch.bfloat16) -> None:
    """With `float32_weight_gradients` parts add up, apart from parameters `left_out`; without it they do not."""
    differences, results = {}, {}
    for on in (True, False):
        logps, whole = results[on] = gradients(model, [(0, 12)], on, dtype)
        in_parts, parts = gradients(model, [(0, 6), (6, 12)], on, dtype)
        assert torch.equal(logps, in_parts)
        differences[on] = apart(whole, parts)
    rounded = {name for name, difference in differences[True].items() if difference > SAME}
    expected = {name for name in rounded if name.endswith(left_out)} if left_out else set()
    assert rounded == expected, {name: differences[True][name] for name in rounded - expected}
    if left_out:
        assert max(differences[True][name] for name in rounded) > ROUNDED
    changed = {name for name, difference in differences[False].items() if difference > ROUNDED}
    assert changed - rounded or left_out
    # outputs keep their bits, and so do gradients of norms and embeddings, which are float32, and so those of inputs
    (logps, ours), (plain, theirs) = results[True], results[False]
    assert torch.equal(logps, plain)
    float32 = [n for n in ours.keys() - changed if "norm" in n or "embed_tokens.weight" in n or "wte" in n]
    assert [name for name in float32 if not torch.equal(ours[name], theirs[name])] == []
    assert max(apart(ours, theirs).values()) < 0.05


def network(kind: str, experts: str | None = None) -> Any:
    torch.manual_seed(0)
    model = tiny_model(kind) if kind == "moe" else architecture(kind, tie_word_embeddings=False)
    install(model, 0.9)
    if experts is not None:
        model.set_experts_implementation(experts)
    return model.train(kind != "phimoe")  # which moves its router's inputs at random


KINDS = sorted({*TINY, *PREFIXED, *REFUSING, *ROUTED, "gemma3_text"})


@pytest.mark.parametrize("kind", few_of(KINDS, ("qwen2", "gpt2", "moe", "llama4_text", "lfm2", "bamba")))
def test_parts_of_a_batch_add_up_to_the_whole(kind):
    assert_parts_add_up(network(kind), LEFT_OUT.get(kind, ()))


@pytest.mark.parametrize("experts", few_of(("eager", "batched_mm"), ("eager",)))
@pytest.mark.parametrize("kind", few_of(("moe", "gpt_oss", "glm4_moe"), ("moe",)))
def test_experts_add_up_however_they_are_computed(kind, experts):
    # GPT-OSS's loop multiplies by `@`
    left_out = ("gate_up_proj", "down_proj") if (kind, experts) == ("gpt_oss", "eager") else ()
    assert_parts_add_up(network(kind, experts), left_out)


def test_replayed_routers_add_up():
    model = network("moe")
    install_routers(model)
    assert_parts_add_up(model)


def test_experts_under_an_adapter_keep_their_attributes():
    model = peft.get_peft_model(network("moe"), lora())
    before = [vars(module).keys() for module in model.modules()]
    assert_parts_add_up(model)
    assert [vars(module).keys() for module in model.modules()] == before


@pytest.mark.parametrize("reentrant", few_of([False, True], [False]))
@pytest.mark.parametrize("kind", few_of(("qwen2", "moe", "lfm2"), ("qwen2",)))
def test_parts_add_up_under_gradient_checkpointing(kind, reentrant):
    model = network(kind)
    _, expected = gradients(model, [(0, 12)], True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_parts_add_up(model, LEFT_OUT.get(kind, ()))
    assert max(apart(gradients(model, [(0, 12)], True)[1], expected).values()) < SAME


def test_parts_add_up_in_fp16():
    assert_parts_add_up(network("qwen2"), dtype=torch.float16)


# ---- Adapters -------------------------------------------------------------------------------------------------------

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{**LORA, "init_lora_weights": False, **options})


ADAPTERS = {
    "dora": ("qwen2", lora(use_dora=True)),
    "Conv1D": ("gpt2", lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "experts": ("qwen3_moe", lora(target_parameters=EXPERTS)),
    "embeddings": ("qwen2", lora(target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"])),
    "adalora": ("qwen2", peft.AdaLoraConfig(total_step=10, target_modules=LORA["target_modules"])),
    "lokr": ("qwen2", peft.LoKrConfig(target_modules=LORA["target_modules"], init_weights=False)),
}
# adapters that multiply without a linear layer
ROUNDED_PARTS = {
    "embeddings": ("lora_embedding_B.default",),
    "adalora": ("lora_A.default", "lora_B.default", "lora_E.default"),
    "lokr": ("lokr_w1.default", "lokr_w2.default"),
}


@pytest.mark.parametrize("name", few_of(ADAPTERS, ("dora", "experts")))
def test_parts_of_an_adapter_add_up(name):
    kind, config = ADAPTERS[name]
    base = network(kind)
    torch.manual_seed(3)
    model = peft.get_peft_model(base, config).train()
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    assert_parts_add_up(model, ROUNDED_PARTS.get(name, ()))


# ---- Modules of users -----------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Owner(nn.Module):
    """Owns weights, and multiplies by them in one way."""

    def __init__(self, product: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.product = product
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.each, self.convolution = nn.Parameter(torch.randn(4, 8, 8)), nn.Conv1d(8, 8, 3, padding=1, groups=2)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(self, input)


# whose gradients are as autocast leaves them
PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "@": lambda m, x: x @ m.weight,
    "a left factor": lambda m, x: m.weight @ x.mT,
    "a part as a left factor": lambda m, x: m.each[1] @ x[0].T,
    "a batch by keyword": lambda m, x: torch.baddbmm(input=m.bias, batch1=x, batch2=m.each),
    "linear": lambda m, x: functional.linear(x, m.each[1], m.bias),
    "convolution": lambda m, x: m.convolution(x.mT),
    "checkpointed": lambda m, x: checkpoint(lambda x: (x @ m.weight).tanh(), x, use_reentrant=False),
    "checkpointed inside": lambda m, x: checkpoint(functional.linear, x, m.weight, m.bias, use_reentrant=False),
}


class Twice(nn.Module):
    """A layer that runs twice, and its weight in another layer too; without gradients once more."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            constant = self.one(input)
        return self.other(self.one(self.one(input))) + constant


class Hooked(nn.Linear):
    """With hooks of a user's, and perhaps a forward that is an attribute."""

    def __init__(self, replaced: bool = False) -> None:
        super().__init__(8, 8, bias=False)
        if replaced:
            self.forward = lambda input: functional.linear(input, self.weight) * 2  # type: ignore[method-assign]
        self.register_forward_hook(lambda *_: None)
        self.register_full_backward_hook(lambda *_: None)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "Conv1D": lambda: Conv1D(8, 8),
    "hooks": lambda: Hooked(),
    "twice": Twice,
    # as autocast leaves them
    "subclass": lambda: Doubled(8, 8),
    "hooks of device_map": lambda: add_hook_to_module(nn.Linear(8, 8), AlignDevicesHook("cpu", io_same_device=True)),
    "hooks and a replaced forward": lambda: Hooked(replaced=True),
}
UNCOVERED = ("subclass", "hooks of device_map", "hooks and a replaced forward")
INPUT = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


def of_module(model: nn.Module, on: bool, dtype: Any = torch.bfloat16, enabled: bool = True) -> Any:
    """The output, and the gradients of the input and of the parameters."""
    input = INPUT.to(next(model.parameters()).dtype).clone().requires_grad_()
    model.zero_grad()
    with float32_weight_gradients(model) if on else nullcontext():
        with torch.autocast("cpu", dtype, enabled=enabled):
            output = model(input)
        output.float().square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), {"input": input.grad, **found}


def compared(model: nn.Module, dtype: Any = torch.bfloat16) -> tuple[Gradients, Gradients]:
    """Gradients without and with `float32_weight_gradients`, which differ by rounding alone."""
    (plain, theirs), (output, ours) = (of_module(model, on, dtype) for on in (False, True))
    assert torch.equal(output, plain)
    assert ours.keys() == theirs.keys()
    assert torch.equal(ours["input"], theirs["input"])
    assert max(apart(ours, theirs).values()) < 0.02
    return theirs, ours


@pytest.mark.parametrize("name", MODULES)
def test_no_gradient_goes_missing(name):
    torch.manual_seed(1)
    model = MODULES[name]()
    before = [dict(vars(module)) for module in model.modules()]
    theirs, ours = compared(model)
    assert ours.keys() >= {n for n, p in model.named_parameters() if p.requires_grad}
    if name != "twice":  # whose gradients are sums of rounded ones
        rounded = [torch.equal(g.bfloat16().float(), g) for n, g in ours.items() if n != "input"]
        assert rounded == [name in UNCOVERED] * len(rounded)
        assert all(torch.equal(g.bfloat16().float(), g) for n, g in theirs.items() if n != "input")
    assert [vars(module).keys() for module in model.modules()] == [attributes.keys() for attributes in before]
    assert all(vars(m).get("forward") is b.get("forward") for m, b in zip(model.modules(), before))


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_modules_are_as_autocast_leaves_them(name, dtype):
    torch.manual_seed(1)
    theirs, ours = compared(Owner(PRODUCTS[name]), dtype)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("case", ["no autocast", "bfloat16 weights", "float64 weights"])
def test_other_precisions_keep_their_bits(case):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), Doubled(8, 8), Conv1D(8, 8), nn.Linear(8, 8))
    model.to({"bfloat16 weights": torch.bfloat16, "float64 weights": torch.float64}.get(case, torch.float32))
    (plain, theirs), (output, ours) = (of_module(model, on, enabled="bfloat16" in case) for on in (False, True))
    assert torch.equal(output, plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_documentation_lists_what_is_covered():
    text = (Path(__file__).parents[3] / "docs" / "precision.md").read_text()
    listed = re.search(r"### What is covered\n[^#]*?\n\n((?:- .*\n)+)", text)
    assert listed is not None
    assert [line.removeprefix("- ").rstrip(";.") for line in listed[1].splitlines()] == list(COVERED)
