"""The embedded demo: what it promises before any training, built from a recipe shortened to seconds.
The full recipe and its learning curve are in tests/recipes; here the data, the reward, the cache and the measurement.
No network, no state outside tmp_path."""

import pytest

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
