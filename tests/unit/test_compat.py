"""TRL's methods are as the trainer overrides them, and a difference is an error that says where."""

import contextlib
import inspect
import warnings

import pytest
import trl
from peft import LoraConfig

from grpo_ext import GRPOConfig, GRPOTrainer, compat
from grpo_ext.errors import ContractError
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer


@pytest.fixture
def verify_anew():
    compat.verify_overrides.cache_clear()
    yield
    compat.verify_overrides.cache_clear()


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
    assert "Install trl>=1.15,<1.17 and transformers>=5.20,<6" in text


@pytest.mark.parametrize("hidden", [True, False])
def test_no_run_warns_of_the_old_names_that_trl_still_uses(hidden, monkeypatch, tmp_path):
    """A place that no longer warns needs no `hiding_old_names`."""
    if not hidden:
        monkeypatch.setattr(compat, "hiding_old_names", contextlib.nullcontext)
    settings = config_kwargs(tmp_path, num_generations_eval=2, max_steps=1)
    del settings["gradient_checkpointing"]  # TRL's default is on
    parts, made = (prompts(12), prompts(2), tiny_tokenizer()), {}
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    places = {
        "configuration": lambda: GRPOConfig(**settings),
        "construction": lambda: GRPOTrainer(
            tiny_model(), letter_reward, made["configuration"], *parts, peft_config=adapter
        ),
        "training": lambda: made["construction"].train(),
        "evaluation": lambda: made["construction"].evaluate(),
    }
    warned = []
    for place, act in places.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made[place] = act()
        warned += [place] * any("gradient_checkpointing" in str(warning.message) for warning in caught)
    assert warned == ([] if hidden else [*places])
