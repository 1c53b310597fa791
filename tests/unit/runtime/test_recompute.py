"""Selective recomputation: the same bits, products that run once, and settings that say two things."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_ext import GRPOConfig
from grpo_ext.errors import ConfigError
from grpo_ext.forward.lm_head import install
from grpo_ext.forward.packed import score_packed, why_not_packed
from grpo_ext.forward.padded import score_padded
from grpo_ext.forward.prefix import score_prefix
from grpo_ext.runtime.recompute import KEEP_PRODUCTS, PRODUCTS
from tests.support.architectures import PREFIXED, architecture
from tests.support.packs import gradient, rows_of
from tests.support.trainers import error, make, update
from tests.tolerances import UPDATE_BFLOAT16

SELECTIVE = {"use_reentrant": False, "context_fn": KEEP_PRODUCTS}
SHAPE = ([7, 12], [[4, 1, 9], [6, 6, 2]])


class Products(TorchDispatchMode):
    """Counts the matrix products that run."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in PRODUCTS
        return function(*args, **(kwargs or {}))


def some(kind: str) -> Any:
    return pytest.param(kind, marks=() if kind in ("qwen2", "gpt2", "lfm2", "qwen3_next") else pytest.mark.full)


@pytest.mark.parametrize("kind", map(some, PREFIXED))
def test_gradients_have_the_same_bits_in_every_form(kind):
    model, batch = architecture(kind).train(), rows_of(*SHAPE)
    install(model, 0.9)
    forms = [score_padded]
    forms += [] if kind == "gpt2" else [score_prefix]  # drops the cache under checkpointing
    forms += [score_packed] if why_not_packed(model) is None else []
    expected = [gradient(form, model, batch) for form in forms]
    model.gradient_checkpointing_enable(SELECTIVE)
    for form, one in zip(forms, expected, strict=True):
        assert torch.equal(gradient(form, model, batch), one), form.__name__


def test_products_run_once_and_the_rest_again():
    model, batch = architecture("llama").train(), rows_of(*SHAPE)
    install(model, 0.9)

    def products() -> int:
        with Products() as counted:
            gradient(score_packed, model, batch)
        return counted.count

    plain = products()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert products() > plain  # the control: transformers' own runs them again
    model.gradient_checkpointing_enable(SELECTIVE)
    assert products() == plain


def test_it_can_be_logged_and_saved():
    assert json.loads(json.dumps(KEEP_PRODUCTS)) == "keep matrix products and attention"
    assert pickle.loads(pickle.dumps(KEEP_PRODUCTS)) == KEEP_PRODUCTS


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gradient_checkpointing": False}, "there is gradient_checkpointing=False"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "there is use_reentrant=True"),
        ({"gradient_checkpointing_kwargs": {"context_fn": KEEP_PRODUCTS}}, "there is a context_fn of your own"),
    ],
)
def test_settings_that_say_two_things_are_refused(tmp_path, settings, says):
    with pytest.raises(ConfigError, match=says):
        GRPOConfig(str(tmp_path), recompute_granularity="selective", **settings)


def test_an_unknown_value_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="recompute_granularity='half' is unknown; use one of 'full', 'selective'"):
        GRPOConfig(str(tmp_path), recompute_granularity="half")


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing_kwargs": '{"use_reentrant": false}'}])
def test_a_trainer_runs_products_once_also_in_a_step_that_samples_nothing(tmp_path, settings):
    def of_resumed_step(name: str, **changes: Any) -> int:
        kept = {
            "rollout_batch_size": 32,
            "max_steps": 2,
            "save_strategy": "steps",
            "save_steps": 1,
            "forward": "padded",
        }
        make(tmp_path / name, **kept, **changes).train()
        resumed = make(tmp_path / name, **kept, **changes)
        step = resumed.training_step

        def counting(*args: Any, **kwargs: Any) -> Any:
            with counted:
                return step(*args, **kwargs)

        resumed.training_step, counted = counting, Products()
        resumed.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-1"))  # within a rollout batch
        return counted.count

    plain, full = of_resumed_step("plain"), of_resumed_step("full", gradient_checkpointing=True)
    selective = {"gradient_checkpointing": True, "recompute_granularity": "selective", **settings}
    assert full > plain > 0
    assert of_resumed_step("selective", **selective) == plain


@pytest.mark.parametrize("kind", ["qwen2", "lfm2", pytest.param("zamba2", marks=pytest.mark.full)])
def test_in_bfloat16_a_weight_is_cast_in_the_forward_and_in_the_recomputation(tmp_path, kind):
    """Where a layer runs twice, too (prefix form, shared layers): the second would be given the cast of the first."""
    shared = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]} if kind == "zamba2" else {}

    def learned(**settings: Any) -> torch.Tensor:
        common = {"bf16": True, "gradient_checkpointing": True, "max_steps": 1, **settings}
        return update(tmp_path / str(len(settings)), kind=architecture(kind, **shared), **common)[0]

    full, selective = learned(), learned(recompute_granularity="selective")
    assert error(full, selective) <= (0 if kind == "qwen2" else UPDATE_BFLOAT16)
