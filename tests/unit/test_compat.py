"""TRL's methods are as the trainer overrides them, and a difference is an error that says where; views of objects."""

from __future__ import annotations

import inspect

import pytest
import transformers
import trl

from grpo_ext import GRPOConfig, GRPOTrainer, compat
from grpo_ext.errors import ContractError
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer


@pytest.fixture
def verify_anew():
    compat.verify_overrides.cache_clear()
    yield lambda: compat.verify_overrides(GRPOTrainer)
    compat.verify_overrides.cache_clear()


# ---- Overrides ------------------------------------------------------------------------------------------------------


def test_the_overrides_fit_the_installed_versions(verify_anew):
    verify_anew()


def test_every_override_is_verified():
    ours = {name for name, value in vars(GRPOTrainer).items() if inspect.isfunction(value)}
    assert {name for name in ours if hasattr(trl.GRPOTrainer, name)} == set(compat.OVERRIDES)


def moved(self, model, inputs, extra):
    """TRL's `_compute_loss` with a parameter more."""


def test_a_parameter_more_on_a_method_that_is_overridden_is_named(monkeypatch, verify_anew, tmp_path):
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", moved)
    with pytest.raises(ContractError) as caught:
        GRPOTrainer(tiny_model(), letter_reward, GRPOConfig(**config_kwargs(tmp_path)), prompts(), tiny_tokenizer())
    text = str(caught.value)
    assert "GRPOTrainer._compute_loss takes (model, inputs, extra), not (model, inputs)" in text
    assert f"trl {trl.__version__}" in text
    assert "1.15 and 1.16" in text


def turn(self, prompt_ids, images, extra, num_generations):
    """TRL's `_generate_single_turn` with another parameter."""


def test_the_first_parameters_have_to_fit_where_the_override_passes_on_what_follows(monkeypatch, verify_anew):
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", turn)
    with pytest.raises(ContractError, match=r"_generate_single_turn takes \(prompt_ids, images, extra, "):
        verify_anew()


def test_a_method_that_is_gone_is_named(monkeypatch, verify_anew):
    monkeypatch.delattr(transformers.Trainer, "_finalize_training")
    with pytest.raises(ContractError, match=r"GRPOTrainer\._finalize_training is missing"):
        verify_anew()


# ---- Views ----------------------------------------------------------------------------------------------------------


class Base:
    def both(self) -> tuple[str, str]:
        return self.name, self.inner()


class Thing(Base):
    name = "own"

    def inner(self) -> str:
        return self.name

    def both(self) -> tuple[str, str]:
        self.asked = True
        return super().both()


def test_a_method_sees_a_view_and_what_it_calls_sees_the_object():
    thing = Thing()
    assert compat.on_view(thing.both, {"name": "other"}) == ("other", "own")
    assert thing.both() == ("own", "own")
    assert compat.on_view(thing.both, {"inner": lambda: "replaced"}) == ("own", "replaced")


def test_what_is_set_on_a_view_is_set_on_the_object_and_nothing_else_changes():
    thing = Thing()
    compat.on_view(thing.both, {"name": "other"})
    assert vars(thing) == {"asked": True}
    view = compat.View(thing, {"name": "other"})
    assert isinstance(view, Thing)
    with pytest.raises(AttributeError, match="nothing"):
        _ = view.nothing


def test_what_is_replaced_can_be_replaced_again_without_reaching_the_object():
    class Mixin(Thing):
        def both(self) -> tuple[str, str]:
            before, self.name = self.name, "mixed"
            try:
                return super().both()
            finally:
                self.name = before

    thing = Mixin()
    assert compat.on_view(thing.both, {"name": "other"}) == ("mixed", "own")
    assert "name" not in vars(thing)


def test_a_method_that_was_replaced_by_a_function_is_named():
    thing = Thing()
    thing.inner = lambda: "patched"
    with pytest.raises(ContractError, match="was put in the place of a method"):
        compat.on_view(thing.inner, {})
