"""The presets of published algorithms: what the papers say, and two steps of a toy model."""

from __future__ import annotations

import math

import pytest

from grpo_ext.demo.catalog import DEMOS
from tests.support.toy_recipe import (
    CONFIGS,
    Overrides,
    as_options,
    load_recipe,
    question_rows,
    settings,
    toy_model,
    train,
)

# what identifies each algorithm, in the names of the configuration
PRESETS = {
    "dapo": {"epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dapo", "dynamic_sampling": True, "beta": 0.0},
    "dr_grpo": {"advantage_estimator": "group_centered", "loss_type": "dr_grpo", "beta": 0.0},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo"},
    "rloo": {"advantage_estimator": "leave_one_out", "loss_aggregation": "sequence_sum"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "dynamic_sampling": True, "beta": 0.0},
}
UPDATES_PER_ROLLOUT = {"dapo": 16, "dr_grpo": 8, "gspo": 4, "rloo": 1, "cispo": 16}

TOY: Overrides = {
    "max_steps": (2, "toy size"),
    "num_generations": (4, "toy size"),
    "global_batch_size": (16, "toy size"),
    "rollout_batch_size": (16, "toy size"),
    "max_completion_length": (16, "toy size"),
    "warmup_steps": (0, "the learning rate would still be near zero after two steps"),
    "logging_steps": (1, "two steps, two lines"),
    "bf16": (False, "float32, as the other toy runs"),
    "prompt_column": ("question", "the columns of the toy data"),
    "answer_column": ("answer", "the columns of the toy data"),
    "answer_after": ("####", "the columns of the toy data"),
}


@pytest.fixture(scope="module")
def recipe():
    return load_recipe()


@pytest.mark.parametrize("name", PRESETS)
def test_it_sets_what_the_paper_says(name):
    found = settings(CONFIGS / f"{name}.yaml")
    assert found | PRESETS[name] == found
    updates = found.get("rollout_batch_size", found["global_batch_size"]) / found["global_batch_size"]
    assert updates == UPDATES_PER_ROLLOUT[name]


@pytest.mark.parametrize("name", PRESETS)
def test_it_parses_with_the_demo(recipe, name):
    demo, script, training, _ = recipe.parse(["--config", str(CONFIGS / f"{name}.yaml")])
    assert demo
    assert training.geometry.steps_per_rollout == UPDATES_PER_ROLLOUT[name]
    assert training.seed == 42, "the demo's own settings fill in what the preset leaves open"
    assert script.rewards == settings(CONFIGS / f"{name}.yaml").get("rewards", [DEMOS["letters"].reward])


@pytest.mark.parametrize("name", PRESETS)
def test_two_steps_of_a_toy_model(recipe, name, tmp_path):
    own: Overrides = {
        "model_name_or_path": (toy_model(tmp_path / "model"), "a preset names no model"),
        "dataset_name": (question_rows(tmp_path / "rows.jsonl"), "a preset names no data"),
        "output_dir": (tmp_path / "out", "the test's own folder"),
    }
    log = train(recipe, ["--config", str(CONFIGS / f"{name}.yaml"), *as_options({**TOY, **own})])
    steps = [line for line in log if "reward" in line]
    assert len(steps) == 2
    assert all(math.isfinite(line["loss"]) for line in steps)
    assert max(line["grad_norm"] for line in steps) > 0, "nothing was learned from"
