"""The embedded demo: what it promises before any training, built from a recipe shortened to seconds.
The full recipe and its learning curve are in tests/recipes; here the data, the reward, the cache and the measurement.
No network, no state outside tmp_path."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_ext.demo import task
from grpo_ext.demo.task import demo_words, load_demo


def test_no_held_out_word_is_in_the_training_or_the_warm_start_set():
    warm, train, held_out = demo_words()
    assert len(held_out) == len(set(held_out)) == task.EVAL_PROMPTS
    assert not set(held_out) & (set(warm) | set(train))


@pytest.fixture(autouse=True)
def short_recipe(monkeypatch, tmp_path):
    monkeypatch.setattr(task, "STEPS", 3)
    monkeypatch.setenv("GRPO_EXT_CACHE", str(tmp_path))


def test_demo_is_built_once_and_then_read_without_a_lock(monkeypatch, tmp_path):
    first = load_demo()
    folders = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert folders == [first.model_path.name], "something is left beside the model"
    monkeypatch.setattr(task, "train_warm_start", lambda *a: pytest.fail("built a second time"))
    monkeypatch.setattr(task, "FileLock", lambda path: pytest.fail("a read-only cache cannot be locked"))
    assert load_demo().model_path == first.model_path


def test_building_is_deterministic_and_leaves_the_callers_random_state_and_threads_alone(monkeypatch, tmp_path):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    models = []
    for name in "ab":
        monkeypatch.setenv("GRPO_EXT_CACHE", str(tmp_path / name))
        models.append(AutoModelForCausalLM.from_pretrained(load_demo().model_path).state_dict())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert [name for name in models[0] if not torch.equal(models[0][name], models[1][name])] == []
