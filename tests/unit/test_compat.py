"""TRL's methods are as the trainer overrides them, and a difference is an error that says where."""

import contextlib
import inspect
import warnings
from typing import Any

import pytest
import trl
from peft import LoraConfig

from grpo_ext import GRPOConfig, GRPOTrainer, compat
from grpo_ext.errors import ContractError
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer
from tests.support.trainers import make


@pytest.fixture
def verify_anew():
    compat.verify_overrides.cache_clear()
    yield
    compat.verify_overrides.cache_clear()


def test_every_override_is_verified():
    ours = {name for name, value in vars(GRPOTrainer).items() if inspect.isfunction(value)}
    assert {name for name in ours if hasattr(trl.GRPOTrainer, name)} == set(compat.overrides(GRPOTrainer))


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


def test_a_parameter_with_a_default_fits_and_is_passed_on(monkeypatch, verify_anew, tmp_path):
    received: list[Any] = []
    inner = trl.GRPOTrainer.log

    def log(self: Any, logs: Any, start_time: Any = None, added: int = 0) -> None:
        received.append(added)
        inner(self, logs, start_time)

    monkeypatch.setattr(trl.GRPOTrainer, "log", log)
    trainer = make(tmp_path)
    trainer.log({"loss": 1.0})
    trainer.log({"loss": 1.0}, added=3)
    assert received == [0, 3]


def test_what_trls_methods_return_is_counted_before_a_trainer_is_built(monkeypatch, verify_anew, tmp_path):
    def five(self: Any, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int) -> Any:
        return prompt_ids, 1, 2, 3, 4

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", five)
    with pytest.raises(ContractError, match=r"_generate_single_turn returns \(prompt_ids, 1, 2, 3, 4\), not 2 values"):
        make(tmp_path)


@pytest.mark.parametrize("returned", [(1, 2, 3, 4, 5), [1, 2, 3, 4], None])
def test_or_at_its_first_call_where_the_source_does_not_show_it(returned):
    assert compat._returns_otherwise("generate", len) is None
    assert compat.values_of("generate", (1, 2, 3, 4)) == (1, 2, 3, 4)
    with pytest.raises(ContractError, match=r"generate returned [15] values, not 4"):
        compat.values_of("generate", returned)


@pytest.mark.parametrize("needed", ["_env_tools", "_environment_pool", "async_loop", "vllm_generation"])
def test_an_attribute_that_is_missing_where_it_is_needed_is_named(tmp_path, needed):
    trainer = make(tmp_path)
    trainer._view.verify()
    trainer.environment_factories, trainer._has_async_funcs, trainer.use_vllm = {None: dict}, True, True
    for name in {"_env_tools", "_environment_pool", "async_loop", "vllm_generation", "_last_loaded_step"} - {needed}:
        setattr(trainer, name, {})
    with pytest.raises(ContractError, match=f"GRPOTrainer has no {needed}\\."):
        trainer._view.verify()


@pytest.mark.parametrize("hidden", [True, False])
def test_no_run_warns_of_the_old_names_that_trl_still_uses(hidden, monkeypatch, tmp_path):
    """A place that no longer warns needs no `hiding_deprecations`."""
    if not hidden:
        monkeypatch.setattr(compat, "hiding_deprecations", contextlib.nullcontext)
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
