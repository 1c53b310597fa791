"""The check before a model's first pack: healthy models pass in every precision, planted faults do not."""

import random
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo_ext.errors import MemoryShortageError
from grpo_ext.forward import attention, forms
from grpo_ext.forward.choice import ForwardChoice
from grpo_ext.forward.form_check import RowsAlone, probe_rows, why_form_fails
from tests.support.packs import rows_of, scoring
from tests.support.selection import few_of
from tests.support.tiny import tiny_tokenizer
from tests.support.trainers import LORA

# settings of each architecture; layers that differ in attention, positions and experts
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "gpt2": {},
    "mixtral": {},
    "mistral": {},
    "gemma2": {"attn_implementation": "eager", "attn_logit_softcapping": 4.0},
    "gemma3_text": {"sliding_window": 5},
}
PRECISIONS = ("autocast", "bfloat16", "float32")


def model_of(kind: str, precision: str = "autocast", seed: int = 0, **sizes: Any) -> Any:
    model = scoring(kind, seed, **{"num_hidden_layers": 3, **KINDS.get(kind, {}), **sizes})
    return model.bfloat16() if precision == "bfloat16" else model


LONG = ([20], [[30, 2, 17, 9]])


def why_no_packs(model: Any, precision: str, batch: Any = None) -> str | None:
    """Why packs are refused, on a batch or on the rows that a run compares."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        batches = probe_rows(model, tiny_tokenizer()) if batch is None else [batch]
        return next(filter(None, (why_form_fails("packed", RowsAlone(model, rows)) for rows in batches)), None)


@pytest.mark.parametrize("start", few_of(range(12), range(len(KINDS))))
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
    batch = rows_of([source.choice([1, 9, 60])], [[*lengths, 2]], seed=start)
    assert why_no_packs(model, precision, batch) is None, (kind, precision, model.config, lengths)
    assert why_no_packs(model, precision) is None, (kind, precision, model.config)


def _ignored_by_the_model(monkeypatch: Any, model: Any) -> None:
    rotate = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, positions: rotate(x, torch.arange(x.size(1))[None].expand(len(x), -1))


def _one_is_one_too_far(monkeypatch: Any, model: Any) -> None:
    build = forms.build_pack

    def shifted(*args: Any) -> Any:
        pack = build(*args)
        for token in range(*pack.layout.groups[0].completions[-1]):
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


def _windows_are_lost(monkeypatch: Any, model: Any) -> None:
    _mask(monkeypatch, lambda whole, group, window, device: whole(group, None, device))


SMALL, LOST = {"initializer_range": 0.1}, "times the rounding, where up to 4 is rounding"


@pytest.mark.parametrize("precision", few_of(PRECISIONS, ("autocast",)))
@pytest.mark.parametrize(
    ("fault", "kind", "sizes", "says"),
    [
        (_ignored_by_the_model, "qwen2", SMALL, LOST),
        (_one_is_one_too_far, "qwen2", SMALL, LOST),
        (_one_sees_its_neighbour, "qwen2", SMALL, LOST),
        # log-probabilities differ by less than the rounding that sixteen layers have multiplied
        (_ignored_by_the_model, "qwen2", {"num_hidden_layers": 16}, "rotary_emb"),
        *((_windows_are_lost, kind, {"max_position_embeddings": 1024}, "") for kind in ("gemma3_text", "gemma2")),
        (_windows_are_lost, "gemma3_text", {"max_position_embeddings": 1024, "sliding_window": 96}, ""),
        (_windows_are_lost, "mistral", {"max_position_embeddings": 1024, "sliding_window": 512}, ""),
    ],
)
def test_a_planted_fault_is_found(monkeypatch, fault, kind, sizes, says, precision):
    model = model_of(kind, precision, **sizes)
    fault(monkeypatch, model)
    reason = why_no_packs(model, precision)
    assert reason is not None
    assert says in reason


def test_the_check_leaves_the_model_and_the_random_numbers_alone():
    model = model_of("qwen2")
    wrapped = get_peft_model(model, LoraConfig(**LORA, init_lora_weights=False)).train()
    model.gradient_checkpointing_enable()

    def state() -> list[Any]:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in wrapped.modules()]
        return [torch.get_rng_state().tolist(), hooks, wrapped.training, model.is_gradient_checkpointing]

    before = state()
    assert why_no_packs(wrapped, "autocast") is None
    assert state() == before


def test_rows_of_text_that_a_model_takes():
    """Longer than its windows, and never longer than its positions."""
    tokenizer = tiny_tokenizer()
    for sizes, longest in (({}, [27]), ({"max_position_embeddings": 16}, [16])):
        batches = probe_rows(model_of("gpt2" if sizes else "llama", **sizes), tokenizer)
        assert [max(map(sum, zip(rows.prompts_B, rows.completions_B))) for rows in batches] == longest
        assert all(rows.same_prompt.count(False) == 1 and len(rows) == 5 for rows in batches)
        assert not {*tokenizer.all_special_ids} & {*torch.cat([rows.ids_N for rows in batches]).tolist()}
    for window, prompts in ((40, [48, 48]), (1024, [1152, 1152]), (1025, None)):
        _, *long = probe_rows(model_of("mistral", sliding_window=window, max_position_embeddings=4096), tokenizer)
        assert [rows.prompts_B for rows in long] == ([prompts] if prompts else [])


def test_a_model_pads_until_it_is_compared_and_its_copy_runs_as_it_does():
    chosen, model, twin = ForwardChoice(("packed",), torch.device("cpu")), model_of("qwen2"), model_of("qwen2")
    assert (chosen.form(model), chosen.planned(model)) == ("padded", "packed")
    chosen.compare(model, lambda policy: [rows_of(*LONG)])
    chosen.use_form_of(model, twin)
    assert chosen.form(model) == chosen.form(twin) == "packed"


def test_each_trainer_is_told_once_that_its_models_pad(caplog):
    """A second trainer of the same process too, which a notebook makes."""
    for _ in range(2):
        choice = ForwardChoice(("packed",), torch.device("cpu"), refused={"packed": "it has no packs"})
        for _ in range(2):
            choice.planned(model_of("qwen2"))
    assert caplog.text.count("Padded batches run, which repeat each prompt") == 2


def test_rows_that_cannot_be_made_or_numbers_that_are_not_finite_refuse_a_form(caplog):
    chosen, model = ForwardChoice(("packed",), torch.device("cpu")), model_of("qwen2")
    chosen.compare(model, lambda policy: [][0])
    assert chosen.form(model) == "padded"
    assert "rows to compare it on could not be made (IndexError: " in caplog.text
    model.lm_head.weight.data[:] = torch.nan
    assert "are not finite" in str(why_no_packs(model, "float32"))


def test_memory_that_does_not_suffice_has_a_remedy():
    model = model_of("qwen2")
    model.model.norm.forward = mock.Mock(side_effect=torch.OutOfMemoryError("out of memory"))
    with pytest.raises(MemoryShortageError, match="forward='padded'"):
        ForwardChoice(("packed",), torch.device("cpu")).compare(model, lambda policy: [rows_of(*LONG)])
