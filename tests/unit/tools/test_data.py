"""Prompts from files and folders: every kind gives the same rows, and every refusal names values, rule and remedy.
Sets of the Hub go through the same steps after `datasets.load_dataset`, which is replaced here.
No network."""

import json

import pytest
from datasets import Dataset, DatasetDict

from grpo_ext.errors import DataError
from grpo_ext.tools.data import DataArguments, load_prompts


def prompts_of(source, seed=0, **options):
    return load_prompts(DataArguments(str(source), **options), seed)


QUESTION = {"prompt_column": "question"}
ROWS = [{"question": f"{n} + 1?", "solution": f"{n} + 1\n#### {n + 1}", "level": n} for n in range(10)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "rows.jsonl")


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


def test_answers_are_renamed_and_cut_after_the_last_marker_and_other_columns_stay(tmp_path):
    rows = [*ROWS, {"question": "?", "solution": "#### 1 #### -2,000 \n", "level": 3}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    train, _ = prompts_of(path, prompt_column="question", answer_column="solution", answer_after="####")
    assert train["answer"][:2] + train["answer"][-1:] == ["1", "2", "-2,000"]
    assert set(train.column_names) == {"prompt", "answer", "level"}


def test_a_template_fills_columns_and_keeps_them(jsonl):
    train, _ = prompts_of(jsonl, prompt_template="{{Q}} {solution} ({level})", answer_column="solution")
    assert train["prompt"][1] == "{Q} 1 + 1\n#### 2 (1)"
    assert set(train.column_names) == {"prompt", "question", "answer", "level"}


def test_prompts_become_messages_with_the_system_prompt_first_and_messages_stay(jsonl, tmp_path):
    system = {"role": "system", "content": "Be brief."}
    options = {**QUESTION, "system_prompt": "Be brief."}
    train, _ = prompts_of(jsonl, **options, conversational=True)
    assert train["prompt"][0] == [system, {"role": "user", "content": "0 + 1?"}]
    assert prompts_of(jsonl, **options)[0]["prompt"][0] == "Be brief.\n\n0 + 1?"
    chat = write_jsonl(tmp_path / "chat.jsonl", [{"question": [{"role": "user", "content": "hi"}]}])
    assert prompts_of(chat, **options)[0]["prompt"][0] == [system, {"role": "user", "content": "hi"}]


def test_held_out_rows_are_a_partition_chosen_by_the_seed(jsonl):
    options = {**QUESTION, "eval_fraction": 0.3, "max_samples": 9}
    train, held_out = prompts_of(jsonl, **options, seed=1)
    assert (len(train), len(held_out)) == (6, 3)
    assert sorted(train["level"][:] + held_out["level"][:]) == list(range(9)), "the first rows"
    assert prompts_of(jsonl, **options, seed=1)[1].to_list() == held_out.to_list()
    others = {tuple(prompts_of(jsonl, **options, seed=seed)[1]["level"]) for seed in range(5)}
    assert len(others) > 1


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROWS, {}, r"'prompt'\] not in the dataset.*\['question', 'solution', 'level'\] \(in .*prompt_column='prompt'"),
        (ROWS, {"prompt_template": "{problem}"}, "asks for 'problem', and the columns are question, solution, level"),
        (ROWS, {"prompt_template": "{question"}, r"^expected '\}'.*prompt_template='\{question'"),
        (ROWS, {**QUESTION, "answer_column": "solution", "answer_after": "@"}, "nothing follows '@' in row 0"),
        (ROWS, {**QUESTION, "eval_fraction": 1.0}, r"^test_size=10 should be.*eval_fraction=1.0"),
        ([{"prompt": "a"}, {"prompt": "  "}], {}, r"^the prompt in row 1 is empty \('  '\).*rows.jsonl'"),
        ([{"prompt": "a", "answer": "b", "gold": "c"}], {"answer_column": "gold"}, "answer already in the dataset"),
    ],
)
def test_errors_show_the_values_and_the_alternatives(tmp_path, rows, options, message):
    with pytest.raises(DataError, match=message):
        prompts_of(write_jsonl(tmp_path / "rows.jsonl", rows), **options)


def test_files_that_are_missing_unknown_empty_or_broken_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text("{not json")
    (tmp_path / "folder").mkdir()
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved")
    for name, message in {
        "missing.jsonl": "^there is no file .*missing.jsonl; check the path",
        "notes.txt": r"'.txt' is not a supported format.*\.jsonl",
        "empty.jsonl": "the file is empty",
        "broken.jsonl": "JSON parse error.*broken.jsonl",
        "folder": "folder is neither a `Dataset`",
        "saved": "no split 'train', only test",
    }.items():
        with pytest.raises(DataError, match=message):
            prompts_of(tmp_path / name)
