"""The configurations for real models: they parse, fit their number of processes, and train at toy size.

What this machine lacks (an accelerator, vLLM, the models, the data) is overridden, each override with its reason.
"""

import math
import re

import pytest

from grpo_ext.batching.sizes import geometry_of
from grpo_ext.checks.settings import check_equal_shares
from grpo_ext.rewards.registry import resolve_rewards
from tests.support.selection import few_of
from tests.support.toy_recipe import (
    CONFIGS,
    Overrides,
    as_options,
    conversation_rows,
    load_recipe,
    question_rows,
    settings,
    toy_model,
    train,
)

SMALL: Overrides = {
    "max_steps": (2, "toy size"),
    "num_generations": (4, "toy size"),
    "global_batch_size": (16, "toy size"),
    "max_completion_length": (16, "toy size; a toy model's answers are a few tokens"),
    "rollout_chunk_size": (16, "toy size"),
    "warmup_steps": (0, "the learning rate would still be near zero after two steps"),
    "logging_steps": (1, "two steps, two lines"),
}
NO_FP16: Overrides = {"fp16": (False, "fp16 needs an accelerator; on the CPU it is float32")}
NO_VLLM: Overrides = {
    "use_vllm": (False, "vLLM is not installed here; tests/vllm trains with it"),
    "bf16": (False, "float32, as the other toy runs"),
}
TWO_STEPS: Overrides = {"rollout_batch_size": (32, "toy size; two steps, as in the file")}
# file: (processes it is for, prompts in its data or None, rows of the toy data, overrides)
REAL = {
    "gsm8k_lora": (1, 7473, question_rows, {**SMALL, **NO_FP16}),
    "gsm8k_7b_fsdp2_vllm": (8, 7473, question_rows, {**SMALL, **NO_VLLM}),
    "math_full_8x80gb": (8, None, conversation_rows, {**SMALL, **NO_VLLM, **TWO_STEPS}),
}
DEMO = ["demo_lora", "demo_two_rewards", "demo_custom_reward"]


@pytest.fixture(scope="module")
def recipe():
    return load_recipe()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_line_has_a_reason_and_every_file_is_read_below(path):
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert [line for line in lines if not re.search(r"\s{2}# \S", line)] == []
    assert path.stem in {*REAL, *DEMO, *PRESETS}


@pytest.mark.parametrize("name", [*REAL, *DEMO])
def test_it_parses_to_what_it_says(recipe, name):
    path = CONFIGS / f"{name}.yaml"
    demo, script, training, model = recipe.parse(["--config", str(path)])
    assert (demo is not None) == (name in DEMO)
    for field, value in settings(path).items():
        values = [getattr(options, field) for options in (script, training, model) if hasattr(options, field)]
        values = [getattr(entry, "value", entry) for entry in values]
        assert value in values, f"{field}: {value!r} became {values}"


@pytest.mark.parametrize("name", [name for name, (processes, _, _, _) in REAL.items() if processes > 1])
def test_what_uses_vllm_deals_equal_shares(recipe, name):
    processes, prompts, _, _ = REAL[name]
    _, _, training, _ = recipe.parse(["--config", str(CONFIGS / f"{name}.yaml")])
    geometry = geometry_of(vars(training), processes)
    # a set of unknown size may leave any rest
    for count in [prompts] if prompts else range(100_000, 100_000 + geometry.prompts_per_rollout):
        check_equal_shares(geometry, count, training.dataloader_drop_last)


# what identifies each algorithm, in the names of the configuration
PRESETS = {
    "dapo": {"epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dapo", "dynamic_sampling": True, "beta": 0.0},
    "dr_grpo": {"advantage_estimator": "group_centered", "loss_type": "dr_grpo", "beta": 0.0},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo"},
    "rloo": {"advantage_estimator": "leave_one_out", "loss_aggregation": "sequence_sum"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "dynamic_sampling": True, "beta": 0.0},
    "max_rl": {"advantage_estimator": "max_rl", "loss_type": "dapo", "num_generations": 16, "beta": 0.0},
    "dppo": {"trust_region": "tv", "trust_region_threshold": 0.15, "loss_type": "dr_grpo", "beta": 0.0},
}
UPDATES_PER_ROLLOUT = {"dapo": 16, "dr_grpo": 8, "gspo": 4, "rloo": 1, "cispo": 16, "max_rl": 1, "dppo": 8}

TOY: Overrides = {
    **SMALL,
    "rollout_batch_size": (16, "toy size"),
    "bf16": (False, "float32, as the other toy runs"),
    "prompt_column": ("question", "the columns of the toy data"),
    "answer_column": ("answer", "the columns of the toy data"),
    "answer_after": ("####", "the columns of the toy data"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_the_paper_says_and_parses_with_the_demo(recipe, name):
    preset = settings(CONFIGS / f"{name}.yaml")
    assert preset | PRESETS[name] == preset
    demo, script, training, _ = recipe.parse(["--config", str(CONFIGS / f"{name}.yaml")])
    assert demo
    assert training.geometry.steps_per_rollout == UPDATES_PER_ROLLOUT[name]
    assert training.seed == 42, "the demo's own settings fill in what the preset leaves open"
    assert script.rewards == preset.get("rewards", ["grpo_ext.demo.task.sorted_letters_reward"])


FEW = ("dapo",)  # what `make test` trains


@pytest.mark.parametrize("name", few_of([*REAL, *PRESETS], FEW))
def test_it_trains_a_toy_model_of_the_same_architecture(recipe, name, tmp_path):
    _, _, rows, overrides = REAL.get(name, (1, None, question_rows, TOY))
    here: Overrides = {
        "model_name_or_path": (toy_model(tmp_path / "model"), "no network; random weights; a preset names no model"),
        "dataset_name": (rows(tmp_path / "rows.jsonl"), "no network; rows of the same form; a preset names no data"),
        "output_dir": (tmp_path / "out", "the test's own folder"),
    }
    log = train(recipe, ["--config", str(CONFIGS / f"{name}.yaml"), *as_options({**overrides, **here})])
    steps = [line for line in log if "loss" in line]
    assert len(steps) == 2
    assert any(0 < line.get("reward", 0) < 1 for line in steps), "right and wrong answers are expected"
    assert all(math.isfinite(line["loss"]) for line in steps)
    assert max(line["grad_norm"] for line in steps) > 0, "nothing was learned from"
    weights = "adapter_model.safetensors" if settings(CONFIGS / f"{name}.yaml").get("use_peft") else "model.safetensors"
    assert (tmp_path / "out" / weights).is_file()


def test_the_example_reward_is_the_share_of_characters_in_place():
    (share_in_place,) = resolve_rewards([f"{CONFIGS.parent / 'rewards' / 'example.py'}:share_in_place"])
    completions, golds = ["abcd", "abdc", "", "abcdef", ""], ["abcd", "abcd", "abcd", "abc", ""]
    messages = [[{"role": "assistant", "content": completion}] for completion in completions]
    for texts in (completions, messages):
        assert share_in_place(prompts=["?"] * 5, completions=texts, answer=golds) == [1.0, 0.5, 0.0, 0.5, 0.0]
