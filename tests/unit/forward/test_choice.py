"""The check before a model's first pack: healthy models pass in every precision, planted faults do not."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo_ext.forward import attention, forms
from grpo_ext.forward.form_check import Trial, try_form
from grpo_ext.forward.lm_head import install
from tests.support.architectures import architecture
from tests.support.packs import rows_of

# settings of each architecture; layers that differ in attention, positions and experts
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "gpt2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {},
    "gemma2": {"attn_implementation": "eager", "attn_logit_softcapping": 4.0},
    "gemma3_text": {"sliding_window": 5},
}
PRECISIONS = ("autocast", "bfloat16", "float32")


def model_of(kind: str, precision: str = "autocast", seed: int = 0, **sizes: Any) -> Any:
    model = architecture(kind, seed, **{"num_hidden_layers": 3, **KINDS.get(kind, {}), **sizes})
    install(model, 0.9)
    return model.bfloat16() if precision == "bfloat16" else model


def arithmetic(precision: str) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()


LONG = ([20], [[30, 2, 17, 9]])


def tried(model: Any, precision: str, batch: Any = None) -> Trial:
    with arithmetic(precision):
        return try_form("packed", model, batch or rows_of(*LONG))


@pytest.mark.parametrize("start", range(12))
def test_a_healthy_start_is_not_refused(start):
    source = random.Random(start)
    kind, precision = list(KINDS)[start % len(KINDS)], PRECISIONS[start % 3]
    model = model_of(
        kind,
        precision,
        seed=start,
        num_hidden_layers=source.choice([1, 3, 8, 16]),
        initializer_range=source.choice([0.01, 0.02, 0.1, 0.5]),
        hidden_size=source.choice([32, 64, 128]),
    )
    lengths = [source.randint(0, source.choice([3, 12, 40])) for _ in range(source.choice([2, 4, 8]))]
    trial = tried(model, precision, rows_of([source.choice([1, 9, 60])], [[*lengths, 2]], seed=start))
    assert trial.refused is None, (kind, precision, model.config, lengths)


def _ignored_by_the_model(monkeypatch: Any, model: Any) -> None:
    rotate = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, positions: rotate(x, torch.arange(x.size(1))[None].expand(len(x), -1))


def _one_is_one_too_far(monkeypatch: Any, model: Any) -> None:
    build = forms.build_pack

    def shifted(*args: Any) -> Any:
        pack = build(*args)
        for token in range(*pack.layout.groups[0].completions[3]):
            pack.positions_N[token] += 1
        return pack

    monkeypatch.setattr(forms, "build_pack", shifted)


def _mask(monkeypatch: Any, change: Any) -> None:
    mask = attention.visible_mask
    monkeypatch.setattr(attention, "_CALL_COST", 10**9)
    monkeypatch.setattr(attention, "visible_mask", lambda group, window, device: change(mask, group, window, device))


def _one_sees_its_neighbour(monkeypatch: Any, model: Any) -> None:
    def change(mask_of: Any, group: Any, window: Any, device: Any) -> torch.Tensor:
        mask, start = mask_of(group, window, device), group.prompt[0]
        *_, before, last = group.completions
        mask[last[0] - start : last[1] - start, before[0] - start : before[1] - start] = True
        return mask

    _mask(monkeypatch, change)


FAULTS = [_ignored_by_the_model, _one_is_one_too_far, _one_sees_its_neighbour]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_planted_fault_is_found(monkeypatch, fault, precision):
    model = model_of("qwen2", precision, initializer_range=0.1)
    fault(monkeypatch, model)
    assert "the model does something between tokens" in str(tried(model, precision).refused)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ignored_positions_are_found_in_a_deep_model_before_training(monkeypatch, precision):
    """Its log-probabilities differ by less than the rounding that sixteen layers have multiplied."""
    model = model_of("qwen2", precision, num_hidden_layers=16)
    _ignored_by_the_model(monkeypatch, model)
    assert "rotary_emb" in str(tried(model, precision).refused)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["gemma3_text", "gemma2"])
def test_a_lost_window_is_found(monkeypatch, kind, precision):
    _mask(monkeypatch, lambda whole, group, window, device: whole(group, None, device))
    assert tried(model_of(kind, precision), precision).refused is not None


def test_an_error_of_the_model_is_raised():
    model = model_of("qwen2")
    model.model.norm.forward = lambda hidden: 1 / 0
    with pytest.raises(ZeroDivisionError):
        tried(model, "float32")


def test_the_check_leaves_the_model_and_the_random_numbers_alone():
    model = model_of("qwen2")
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, adapter).train()
    model.gradient_checkpointing_enable()

    def state() -> list[Any]:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in wrapped.modules()]
        return [torch.get_rng_state().tolist(), hooks, wrapped.training, model.is_gradient_checkpointing]

    before = state()
    with arithmetic("autocast"):
        trial = try_form("packed", wrapped, rows_of(*LONG))
    assert (trial.refused, trial.tokens > 0) == (None, True)
    assert state() == before
