"""A row by itself is the truth: where padding or a batch changes a model, the micro-batch size changes nothing."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig

from grpo_ext import GRPOTrainer
from grpo_ext.forward import choice
from grpo_ext.forward.lm_head import TARGETS
from grpo_ext.forward.zeros import zeros_filled
from tests.support.padding import Canon, CausalMean, recurrent_gemma, rwkv, with_hook, with_module, with_scale
from tests.support.selection import few_of
from tests.support.tiny import prompts, tiny_model
from tests.support.trainers import LORA, change, error, form_of, make, ran, update
from tests.tolerances import DIFFERENT, UPDATE

# by name a model, and the completions in a forward that it may run: of one length, or one
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "recurrent_gemma": (recurrent_gemma, "equal_lengths"),
    "rwkv": (rwkv, "equal_lengths"),
    "mean": (lambda: with_module(CausalMean), "equal_lengths"),
    "convolution": (lambda: with_module(Canon), "equal_lengths"),
    "zero": (lambda: with_module(functools.partial(Canon, kernel=[0.0] * 4)), "equal_lengths"),
    "identity": (lambda: with_module(functools.partial(Canon, kernel=[0.0, 0.0, 0.0, 1.0])), "equal_lengths"),
    "scale": (lambda: with_scale(1e-5), "equal_lengths"),
    "hook": (lambda: with_hook(1), "equal_lengths"),
    "hook_over_rows": (lambda: with_hook(0), "single"),
}
SHORT: dict[str, Any] = {"max_steps": 1, "global_batch_size": 8, "max_completion_length": 6}
# of a model, a module, and a hook; of what begins at zero. The others are wrong in the same ways, and the mean
# is the model of the tests below
FEW = ("recurrent_gemma", "zero")


def forwards_of(trainer: Any) -> list[tuple[int, set[int]]]:
    """Rows of each forward of a step, a rollout or an evaluation, and the widths of padding; not of sampling."""
    trainer._forwards.choose_forms(trainer._view.models)  # which pads, before they are noted
    forwards: list[tuple[int, set[int]]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if TARGETS in kwargs:
            seen_BL = kwargs["attention_mask"].bool()
            forwards.append((len(seen_BL), set((~seen_BL).sum(1).tolist())))

    for model in trainer._view.models:
        model.register_forward_pre_hook(note, with_kwargs=True)
    return forwards


@pytest.mark.parametrize("kind", few_of(WRONG, FEW))
def test_the_update_does_not_depend_on_the_micro_batch_size(tmp_path, kind):
    build, batching = WRONG[kind]
    # a module that begins at zero, or small, is wrong once it has moved
    moves = {"learning_rate": 1e-2, "max_steps": 2} if kind in ("zero", "identity", "scale") else {}
    settings = {**SHORT, **moves}
    learned = []
    for size in (8, 1):
        trainer = make(tmp_path / str(size), build(), per_device_train_batch_size=size, **settings)
        forwards = forwards_of(trainer)
        learned.append(change(trainer))
        assert trainer._forwards.choice.batching(trainer.model) == batching
        assert all(widths == {0} for _, widths in forwards)
        if size == 8:
            assert (max(rows for rows, _ in forwards) > 1) is (batching == "equal_lengths")
    assert error(*learned) <= UPDATE


def test_the_control_is_wrong_where_rows_are_padded(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "why_form_fails", lambda *args: None)
    settings = {"forward": "padded", **SHORT}
    sizes = ({"per_device_train_batch_size": size} for size in (8, 1))
    one, other = (update(tmp_path, with_module(CausalMean), **settings, **size)[0] for size in sizes)
    assert error(one, other) > DIFFERENT


EVERYWHERE = {"beta": 0.1, "num_iterations": 2, "max_steps": 2, "eval_dataset": prompts(3), "pad_to_multiple_of": 8}


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 40, "top_entropy_quantile": 0.5},
        *(pytest.param(settings, marks=pytest.mark.full) for settings in ({}, {"forward": "padded"})),
        pytest.param({"micro_batch_tokens": 40}, marks=pytest.mark.full),
        pytest.param({"top_entropy_quantile": 0.5}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_forward_of_such_a_model_has_no_padding(tmp_path, settings):
    """Of the reference, of old log-probabilities and of an evaluation too, and where widths are multiples."""
    trainer = make(tmp_path, with_module(CausalMean), **EVERYWHERE, **settings)
    forwards = forwards_of(trainer)
    trainer.train()
    assert len(forwards) >= 16
    trainer.evaluate()
    assert {width for _, widths in forwards for width in widths} == {0}
    assert max(rows for rows, _ in forwards) > 1


def test_the_control_has_padding(tmp_path):
    """Rows of a model that padding does not change."""
    plain = make(tmp_path / "plain", forward="padded", **EVERYWHERE)
    forwards = forwards_of(plain)
    plain.train()
    assert max(width for _, widths in forwards for width in widths) > 8


@pytest.mark.full
def test_a_user_who_calls_for_log_probabilities_gets_those_of_rows_alone(tmp_path):
    class Own(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            return super()._get_per_token_logps_and_entropies(model, ids.clone(), mask, *args, **kwargs)

    whole, own = (update(tmp_path, with_module(CausalMean), cls=cls, **SHORT)[0] for cls in (GRPOTrainer, Own))
    assert error(whole, own) <= UPDATE


@pytest.mark.full
def test_bitwise_mode_repeats_its_bits_for_every_micro_batch_size(tmp_path):
    settings = {"bitwise_invariant": True, **SHORT}
    learned = [
        update(tmp_path / str(size), with_module(CausalMean), per_device_train_batch_size=size, **settings)[0]
        for size in (8, 3)
    ]
    assert torch.equal(*learned)


def wrong_under_padding_alone() -> Any:
    """A GPT-2 that counts positions from 1 where there is padding; a pack has none."""
    model = tiny_model("gpt2")

    def count(module: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        if mask is not None and not mask.all():  # transformers passes none where nothing is padded
            kwargs["position_ids"] = kwargs["position_ids"] + 1
        return args, kwargs

    model.transformer.register_forward_pre_hook(count, with_kwargs=True)
    return model


def test_packs_run_where_only_padding_is_wrong(tmp_path, caplog):
    trainer = make(tmp_path, wrong_under_padding_alone(), max_steps=1)
    assert form_of(ran(trainer)) == "packed"
    assert trainer._forwards.choice.batching(trainer.model) == "equal_lengths"
    assert "A batch changes what the model computes (padded log-probabilities of GPT2LMHeadModel differ" in caplog.text
    assert "no packs" not in caplog.text


def test_packs_of_such_a_model_have_the_units_of_training_in_rollouts_too(tmp_path):
    """In bitwise mode, where old log-probabilities are those of the first pass bit for bit."""
    settings = {"bitwise_invariant": True, "num_iterations": 2, "skip_zero_contribution": False, "max_steps": 1}
    trainer = make(tmp_path, wrong_under_padding_alone(), **settings)
    trainer._forwards.choose_forms(trainer._view.models)
    packs: dict[bool, set[int]] = {True: set(), False: set()}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if TARGETS in kwargs:
            packs[torch.is_grad_enabled()].add(kwargs["input_ids"].numel())

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train()
    assert packs[True] == packs[False]
    assert len(packs[True]) <= 4  # of a group each, not of a completion


@pytest.mark.full
def test_a_model_that_padding_does_not_change_keeps_its_form_and_the_plan_says_what_others_cost(tmp_path, caplog):
    trainer = ran(make(tmp_path / "right", forward="padded", max_steps=1))
    assert trainer._forwards.choice.batching(trainer.model) == "any"
    assert "padded batches hold" not in caplog.text
    make(tmp_path / "wrong", with_module(CausalMean), max_steps=1).train()
    assert re.search(r"  forward +padded: .*; padded batches hold rows of one length alone", caplog.text)
    assert "so there are more of them, and steps take longer" in caplog.text
    assert caplog.text.count("times the rounding") == 3  # said once, and in the plan of each refused form


def test_the_comparison_restores_weights_that_begin_at_zero(tmp_path, monkeypatch):
    """Those of an adapter too, and where it fails."""
    trainer = make(tmp_path, peft_config=LoraConfig(**LORA), max_steps=1)
    filled: list[bool] = []
    fails = choice.why_form_fails

    def look(form: Any, alone: Any, *args: Any) -> Any:
        filled.append(all(p.any() for n, p in alone.model.named_parameters() if "lora_B" in n))
        return fails(form, alone, *args)

    monkeypatch.setattr(choice, "why_form_fails", look)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer._forwards.choose_forms([trainer.model])
    assert filled == [True, True]  # packs, then padding
    assert trainer._forwards.choice.form(trainer.model) == "packed"
    with pytest.raises(KeyError), zeros_filled(trainer.model):
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert not any(value.any() for name, value in before.items() if "lora_B" in name)
