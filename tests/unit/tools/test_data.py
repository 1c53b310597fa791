"""Prompts from files and folders: every kind gives the same rows, and every refusal names values, rule and remedy.
Sets of the Hub go through the same steps after `datasets.load_dataset`, which is replaced here.
No network."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict

from grpo_ext.errors import ConfigError, DataError
from grpo_ext.tools import data
from grpo_ext.tools.data import DataArguments, load_prompts


def prompts_of(source, seed=0, **options):
    return load_prompts(DataArguments(str(source), **options), seed)


ROWS = [{"question": f"{n} + 1?", "solution": f"{n} + 1\n#### {n + 1}", "level": n} for n in range(10)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_kind_of_file_and_folder_gives_the_same_rows(tmp_path, jsonl):
    dataset = Dataset.from_list(ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.to_csv(tmp_path / "rows.csv")
    dataset.save_to_disk(tmp_path / "saved")
    DatasetDict(train=dataset, other=dataset.select([0])).save_to_disk(tmp_path / "saved_dict")
    expected = [{"solution": r["solution"], "level": r["level"], "prompt": r["question"]} for r in ROWS]
    for name in ("rows.jsonl", "rows.json", "rows.parquet", "rows.csv", "saved", "saved_dict"):
        train, held_out = prompts_of(tmp_path / name, prompt_column="question")
        assert train.to_list() == expected, name
        assert held_out is None


def test_answers_are_renamed_and_cut_at_the_marker_and_other_columns_stay(jsonl):
    train, _ = prompts_of(jsonl, prompt_column="question", answer_column="solution", answer_after="####")
    assert train["answer"][:2] == ["1", "2"]
    assert set(train.column_names) == {"prompt", "answer", "level"}


def test_the_answer_is_what_follows_the_last_marker(tmp_path):
    rows = [{"prompt": "a", "answer": "#### 1 #### -2,000 \n"}]
    train, _ = prompts_of(write_jsonl(tmp_path / "rows.jsonl", rows), answer_after="####")
    assert train["answer"][:] == ["-2,000"]


def test_template_fills_columns_and_keeps_them(jsonl):
    train, _ = prompts_of(jsonl, prompt_template="{{Q}} {question} ({level})", answer_column="solution")
    assert train["prompt"][1] == "{Q} 1 + 1? (1)"
    assert "question" in train.column_names


def test_prompts_become_messages_with_the_system_prompt_first(jsonl):
    train, _ = prompts_of(jsonl, prompt_column="question", conversational=True, system_prompt="Be brief.")
    assert train["prompt"][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "0 + 1?"},
    ]
    plain, _ = prompts_of(jsonl, prompt_column="question", system_prompt="Be brief.")
    assert plain["prompt"][0] == "Be brief.\n\n0 + 1?"


def test_prompts_that_are_messages_stay_messages(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}]
    train, _ = prompts_of(write_jsonl(tmp_path / "chat.jsonl", rows), system_prompt="S")
    assert [m["content"] for m in train["prompt"][0]] == ["S", "hi"]


def test_held_out_rows_are_a_partition_chosen_by_the_seed(jsonl):
    options = {"prompt_column": "question", "eval_fraction": 0.3, "max_samples": 9}
    train, held_out = prompts_of(jsonl, **options, seed=1)
    assert (len(train), len(held_out)) == (6, 3)
    assert sorted(train["level"][:] + held_out["level"][:]) == list(range(9)), "the first rows"
    assert prompts_of(jsonl, **options, seed=1)[1].to_list() == held_out.to_list()
    others = {tuple(prompts_of(jsonl, **options, seed=seed)[1]["level"]) for seed in range(5)}
    assert len(others) > 1


def test_hub_set_is_asked_for_by_configuration_and_split(monkeypatch):
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr(data, "load_dataset", load)
    train, _ = prompts_of("someone/some_set", dataset_config="main", dataset_split="test", prompt_column="question")
    assert asked == [(("someone/some_set", "main"), {"split": "test"})]
    assert len(train) == 10


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, DataError, r"no column 'prompt' \(prompt_column\); its columns are question, solution, level"),
        ({"prompt_template": "{problem}"}, DataError, r"no column 'problem' \(prompt_template '\{problem\}'\)"),
        ({"prompt_template": "{question"}, DataError, r"cannot be read"),
        ({"prompt_column": "question", "answer_column": "solution", "answer_after": "@"}, DataError, r"row 0: nothing"),
        ({"prompt_column": "question", "eval_fraction": 1.0}, ConfigError, r"eval_fraction=1.0"),
        ({"prompt_column": "question", "eval_fraction": 0.01}, DataError, r"leaves 0 to evaluate on and 10"),
        ({"prompt_column": "question", "max_samples": 0}, ConfigError, r"max_samples=0"),
    ],
)
def test_refusals_show_the_values_and_what_there_is(jsonl, options, error, message):
    with pytest.raises(error, match=message):
        prompts_of(jsonl, **options)


def test_empty_prompts_are_refused_by_row_number(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "  "}, {"prompt": None}]
    with pytest.raises(DataError, match=r"row 1, column 'prompt': the prompt is empty"):
        prompts_of(write_jsonl(tmp_path / "rows.jsonl", rows))


def test_a_name_taken_by_another_column_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b", "gold": "c"}])
    with pytest.raises(DataError, match="column 'answer' beside 'gold'"):
        prompts_of(path, answer_column="gold")


def test_files_that_are_missing_unknown_empty_or_broken_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"missing.jsonl does not exist"):
        prompts_of(tmp_path / "missing.jsonl")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"extension '.txt'.*\.jsonl"):
        prompts_of(tmp_path / "notes.txt")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="has no rows"):
        prompts_of(tmp_path / "empty.jsonl")
    (tmp_path / "broken.jsonl").write_text("{not json")
    with pytest.raises(DataError, match=r"broken.jsonl could not be read"):
        prompts_of(tmp_path / "broken.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder could not be read .*neither a `Dataset`"):
        prompts_of(tmp_path / "folder")
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="no split 'train'; it has test"):
        prompts_of(tmp_path / "saved")
