"""The check before a model's first pack: healthy models pass in every precision, planted faults do not."""

from __future__ import annotations

import contextlib
import logging
import random
from typing import Any

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Qwen2Config,
)

from grpo_ext.errors import MemoryShortageError
from grpo_ext.forward import attention, forms
from grpo_ext.forward import choice as module
from grpo_ext.forward.choice import ForwardChoice
from grpo_ext.forward.form_check import Trial, discriminating_rows, try_form
from grpo_ext.forward.lm_head import install
from grpo_ext.forward.rows import TokenRows
from tests.support.packs import rows_of

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {}),
    "llama": (LlamaConfig, {}),
    "gpt2": (GPT2Config, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral": (MistralConfig, {"sliding_window": 6}),
    "gemma2": (Gemma2Config, {"sliding_window": 5, "attn_logit_softcapping": 4.0, "head_dim": 16}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 5, "head_dim": 16}),
}
PRECISIONS = ("autocast", "bfloat16", "float32")


def model_of(kind: str, precision: str = "autocast", seed: int = 0, **sizes: Any) -> Any:
    """As transformers would initialise it (a range of 0.02), unless `sizes` say otherwise."""
    plain = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    heads = {} if kind == "gpt2" else {"num_key_value_heads": 2}
    ids = {"vocab_size": 60, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    config, own = KINDS[kind]
    torch.manual_seed(seed)
    options = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(config(**{**plain, **heads, **ids, **own, **sizes}), **options)
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


def _positions(monkeypatch: Any, model: Any, change: Any) -> None:
    build = forms.build_pack

    def shifted(*args: Any) -> Any:
        pack = build(*args)
        for group in pack.layout.groups:
            for segment, (start, stop) in enumerate(group.completions):
                for token in range(start, stop):
                    pack.positions_N[token] = change(pack.positions_N[token], token, segment)
        return pack

    monkeypatch.setattr(forms, "build_pack", shifted)


def _mask(monkeypatch: Any, change: Any) -> None:
    whole = attention.seen_mask
    monkeypatch.setattr(attention, "_CALL_COST", 10**9)
    monkeypatch.setattr(
        attention, "seen_mask", lambda group, window, device: change(whole, group, window, device).bool()
    )


def _ignored_by_the_model(monkeypatch: Any, model: Any) -> None:
    rotate = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, positions: rotate(x, torch.arange(x.size(1))[None].expand(len(x), -1))


def _one_sees_its_neighbour(whole: Any, group: Any, window: Any, device: Any) -> torch.Tensor:
    mask = whole(group, window, device)
    *_, before, last = group.completions
    mask[last[0] - group.prompt[0] : last[1] - group.prompt[0], before[0] - group.prompt[0] : before[1]] = True
    return mask


FAULTS: dict[str, Any] = {
    "ignored_by_the_model": _ignored_by_the_model,
    "one_too_far": lambda patch, model: _positions(patch, model, lambda position, token, segment: position + 1),
    "one_of_them_off": lambda patch, model: _positions(
        patch, model, lambda position, token, segment: position + (segment == 3)
    ),
    "all_see_each_other": lambda patch, model: _mask(
        patch, lambda whole, group, window, device: torch.ones(group.answers[1], group.answers[1]).tril()
    ),
    "one_sees_its_neighbour": lambda patch, model: _mask(patch, _one_sees_its_neighbour),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_planted_fault_is_found(monkeypatch, fault, precision):
    model = model_of("qwen2", precision, initializer_range=0.1)
    FAULTS[fault](monkeypatch, model)
    assert "the model does something between tokens" in str(tried(model, precision).refused)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ignored_positions_are_found_in_a_deep_model_before_training(monkeypatch, precision):
    """Its log-probabilities differ by less than the rounding that sixteen layers have multiplied."""
    model = model_of("qwen2", precision, num_hidden_layers=16)
    _ignored_by_the_model(monkeypatch, model)
    assert "rotary_emb" in str(tried(model, precision).refused)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["gemma3", "gemma2"])
def test_a_lost_window_is_found(monkeypatch, kind, precision):
    _mask(monkeypatch, lambda whole, group, window, device: whole(group, None, device))
    assert tried(model_of(kind, precision), precision).refused is not None


@pytest.mark.parametrize("kind", [NemotronConfig, DogeConfig])
def test_that_a_model_takes_no_packs_is_found_out_by_trying(kind):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(kind(**sizes, num_key_value_heads=2, vocab_size=60, pad_token_id=0))
    install(model, 0.9)
    assert forms.why_not_packed(model) is None
    refused = str(tried(model, "autocast").refused)
    assert type(model).__name__.removesuffix("ForCausalLM") in refused
    assert "differ" not in refused


def test_an_error_of_the_model_itself_is_no_refusal():
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


def test_rows_that_can_show_a_fault():
    assert discriminating_rows([1, 1, 1, 1], [True] * 3) is None  # the first token is predicted from the prompt
    assert discriminating_rows([7, 1, 0, 1], [True] * 3) is None  # no neighbour
    assert discriminating_rows([7, 1, 0, 2], [True] * 3) == slice(0, 4)
    assert discriminating_rows([1] * 8 + [3] * 4, [True] * 11) == slice(8, 12)


SHORT, SOME = ([4], [[1, 1, 1]]), ([4], [[3, 2, 5]])


def checking(monkeypatch: Any, others: list[Trial], elsewhere: bool = False) -> tuple[ForwardChoice, list[Any]]:
    """`ForwardChoice` beside another process that found `others`; the lengths of the completions looked at here."""
    looked: list[Any] = []
    monkeypatch.setattr(module, "any_process", lambda value, device: value or elsewhere)
    monkeypatch.setattr(module, "gather_lists", lambda trials: [*trials, *others])

    def watched(form: Any, model: Any, rows: TokenRows, checkpointing: Any) -> Trial:
        looked.append([sum(lengths) for lengths in zip(rows.prompts_B, rows.completions_B)])
        return try_form(form, model, rows, checkpointing)

    monkeypatch.setattr(module, "try_form", watched)
    monkeypatch.setattr(module, "logger", logging.getLogger(module.__name__))  # Accelerate's wants processes
    return ForwardChoice(("packed",), torch.device("cpu")), looked


def look(chosen: ForwardChoice, model: Any, batch: Any) -> None:
    chosen.check(model, rows_of(*batch))


def test_a_refusal_on_one_process_pads_on_all(monkeypatch, caplog):
    chosen, looked = checking(monkeypatch, [Trial(refused="it will not")])
    model, reference = model_of("qwen2"), model_of("qwen2")
    for one in (model, reference, model):
        look(chosen, one, LONG)
        assert chosen.form(one) == "padded"
    assert caplog.text.count("Padded batches run") == caplog.text.count("(no packs: it will not)") == 1
    assert len(looked) == 2


def test_short_completions_do_not_settle_it(monkeypatch):
    chosen, looked = checking(monkeypatch, [])
    model = model_of("qwen2")
    for batch in (SHORT, SOME, SHORT, LONG, LONG):
        look(chosen, model, batch)
    assert looked == [[7, 6, 9], [50, 22, 37, 29]]


def test_a_process_without_completions_that_can_show_a_fault_runs_along_and_settles_nothing(monkeypatch):
    chosen, looked = checking(monkeypatch, [Trial(tokens=3)], elsewhere=True)
    model = model_of("qwen2")
    one_long = ([4], [[40, 1]])  # alone it has no neighbour
    for _ in range(3):
        look(chosen, model, one_long)
    assert len(looked) == 3
    assert not chosen.settled(model)


def test_the_same_completions_on_every_process_count_once(monkeypatch):
    chosen, looked = checking(monkeypatch, [Trial(tokens=10)] * 9)
    model = model_of("qwen2")
    look(chosen, model, SOME)
    assert not chosen.settled(model)
    look(chosen, model, LONG)
    assert chosen.settled(model)
    assert len(looked) == 2


def test_memory_that_does_not_suffice_on_one_process_ends_all(monkeypatch):
    PartialState(cpu=True)  # Accelerate's loggers want it
    chosen, _ = checking(monkeypatch, [])
    model = model_of("qwen2")

    def out_of_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(module, "try_form", out_of_memory)
    with pytest.raises(MemoryShortageError, match="forward='padded'"):
        look(chosen, model, LONG)
    beside, _ = checking(monkeypatch, [Trial(shortage="comparing ran out of memory")])
    with pytest.raises(MemoryShortageError, match="ran out of memory"):
        look(beside, model, LONG)
