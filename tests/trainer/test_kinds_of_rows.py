"""Rows of different kinds in one data set: each is judged by itself, and what cannot be trained is found at once."""

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from datasets import Dataset, IterableDataset, arrow_dataset

from grpo_ext import GRPOTrainer
from grpo_ext.errors import DataError, RolloutError
from tests.support.selection import few_of
from tests.support.tiny import letter_reward, prompts, tiny_model, tiny_scorer, tiny_tokenizer, tokenizer_with
from tests.support.trainers import make, ran, train_and_keep_first, watched

USER = {"role": "user", "content": "ab"}
REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
)


def mixed() -> list[dict[str, Any]]:
    """Rows with other keys, texts and messages."""
    return [
        {"prompt": "abc>", "answer": "abc"},
        {"prompt": [USER], "test": "x == 1"},
        {"prompt": "de>"},
        {"prompt": [{"role": "user", "content": "cd"}], "answer": "cd", "level": 3},
        {"prompt": "gh>", "level": 4},
    ]


def stream(rows: list[dict[str, Any]]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def transformed(rows: list[dict[str, Any]]) -> Dataset:
    """A map-style set whose rows a transform makes, each with keys of its own."""

    def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        (number,) = batch["number"]
        return {name: [value] for name, value in rows[number].items()}

    return Dataset.from_dict({"number": range(len(rows))}).with_transform(read)


@pytest.mark.parametrize("data", few_of([stream, transformed], [stream]))
def test_reward_functions_get_the_columns_of_all_rows(tmp_path, data):
    calls = []

    def reward(prompts, completions, answer, test, level, **columns):
        calls.extend(zip(prompts, answer, test, level, strict=True))
        assert all(isinstance(prompt, str) is isinstance(text, str) for prompt, text in zip(prompts, completions))
        return [float(len(str(completion))) for completion in completions]

    chat = tiny_tokenizer(chat=True)
    sizes = {"rollout_chunk_size": 4, "max_steps": 1, "global_batch_size": 20, "shuffle_dataset": False}
    make(tmp_path, reward=reward, train_dataset=data(mixed()), processing_class=chat, **sizes).train()
    rows = [(row["prompt"], row.get("answer"), row.get("test"), row.get("level")) for row in mixed()]
    assert calls == [row for row in rows for _ in range(4)]


def test_a_reward_model_reads_each_row_as_it_is(tmp_path):
    chat = tiny_tokenizer(chat=True)
    parts = {"processing_class": chat, "reward_processing_classes": chat, "train_dataset": stream(mixed())}
    trainer = ran(make(tmp_path, reward=tiny_scorer(), max_steps=1, global_batch_size=20, **parts))
    assert {type(completion) for completion in trainer._logs["completion"]} == {str, list}


def test_columns_that_a_callback_gives_the_data_set_reach_the_reward(tmp_path):
    """TRL's users set a transform on the loader's data set; ours is of steps over theirs."""
    seen = []
    reward = watched(lambda length=(), **columns: seen.extend(length))

    def begin(train_dataloader: Any, **kwargs: Any) -> None:
        data = train_dataloader.dataset
        assert data.column_names == ["prompt", "answer"]
        data.set_transform(lambda rows: {**rows, "length": [len(prompt) for prompt in rows["prompt"]]})

    callback = transformers.TrainerCallback()
    callback.on_train_begin = lambda args, state, control, **kwargs: begin(**kwargs)
    make(tmp_path, reward=reward, max_steps=1, callbacks=[callback]).train()
    assert len(seen) == 16
    assert min(seen) > 0


# the odd row, by what the error says of it
ODD: dict[str, Any] = {
    r"\[3, 4, 5\] is neither .*decode token ids": [3, 4, 5],
    r"\{.*\} is neither .*into a list": USER,
    r"\[\{'from': .* is neither .*rename 'from' and 'value'": [{"from": "human", "value": "ab"}],
    r"is neither .* \(\{'role': 'user'\}\)": [{"role": "user"}],
    r"is neither .* \(\{'content': None, .* fill contents": [USER, {"role": "assistant", "content": None}],
    "does not accept .*System role not supported": [{"role": "system", "content": "be kind"}, USER],
    "None is neither": None,
    f"prompt 'e<image>f>' has the token id {len(tiny_tokenizer())}": "e<image>f>",
}


def larger(token: str, **changes: Any) -> Any:
    """A tokenizer with a token that the tiny model has no row for."""
    tokenizer = tokenizer_with(**changes)
    tokenizer.add_tokens([token])
    return tokenizer


def odd_rows() -> Iterator[Any]:
    """In `make test` two of them in a stream too, where the same function looks at them."""
    for streamed, (place, words) in itertools.product((False, True), enumerate(ODD)):
        yield pytest.param(streamed, words, marks=pytest.mark.full if streamed and place > 1 else ())


@pytest.mark.parametrize(("streamed", "words"), odd_rows())
def test_a_prompt_of_a_kind_that_cannot_be_trained_is_found(tmp_path, words, streamed):
    """At construction; in a stream by the first rollout, with the same words."""
    chat = larger("<image>", chat_template=REFUSES_SYSTEM)
    rows = [{"prompt": [USER]}, {"prompt": "ab>"}, {"prompt": [USER, USER]}, {"prompt": ODD[words]}]
    place = "the " if streamed else "row 3 of the training data set: the "

    def begin() -> None:
        trainer = make(tmp_path, train_dataset=stream(rows) if streamed else transformed(rows), processing_class=chat)
        if streamed:
            trainer.train()

    with pytest.raises(DataError, match=f"^{place}.*{words}"):
        begin()


def test_messages_without_a_template_are_found_in_every_set(tmp_path):
    data = Dataset.from_list([{"prompt": [USER]}] * 4)
    with pytest.raises(
        DataError, match=r"row 0 of the evaluation 'b' data set: .*chat_template.*or use texts as prompts"
    ):
        make(tmp_path, eval_dataset={"a": prompts(2), "b": data})


def test_a_completion_without_tokens_is_named_with_its_prompt(tmp_path):
    class Own(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            ids, logps = super()._generate_single_turn(*args, **kwargs)
            return [[], *ids[1:]], logps

    trainer = make(tmp_path, cls=Own, shuffle_dataset=False, train_dataset=prompts(4))
    with pytest.raises(RolloutError, match=f"prompt '{prompts(4)[0]['prompt']}' has no tokens.*the end token"):
        trainer.train()


def test_an_end_token_that_the_embedding_lacks_is_found(tmp_path):
    tokenizer = larger("<end>")
    tokenizer.pad_token = "<end>"
    with pytest.raises(DataError, match="the padding token '<end>' has the token id"):
        make(tmp_path, processing_class=tokenizer)
    tokenizer.eos_token = "<end>"
    with pytest.raises(DataError, match=r"the end token '<end>' has the token id .*resize_token_embeddings"):
        make(tmp_path, processing_class=tokenizer)
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer))
    make(tmp_path, model, processing_class=tokenizer, reward=letter_reward, max_steps=1).train()


def test_prompts_that_are_alike_in_json_alone_are_tokenised_each(tmp_path):
    first, second = {1: 5}, {"1": 5}
    tokenizer = tokenizer_with(chat_template="{{ 'a' if 1 in messages[0]['content'] else 'b' }}")
    a, b = (tokenizer(letter)["input_ids"] for letter in "ab")

    def reward(prompts, completions, completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    rows = stream([{"prompt": [{"role": "user", "content": value}]} for value in (first, second)] * 2)
    parts = {"processing_class": tokenizer, "reward": reward, "train_dataset": rows}
    trainer = make(tmp_path, max_steps=1, shuffle_dataset=False, **parts)
    batch = train_and_keep_first(trainer)
    assert [ids.tolist() for ids in batch["prompt_ids"]] == ([a] * 4 + [b] * 4) * 2


def test_a_trainer_reads_each_prompt_once_when_it_is_built(tmp_path, monkeypatch):
    read: collections.Counter[str] = collections.Counter()
    inner = arrow_dataset.format_table  # through which every row of a data set goes, however it is read

    def counted(table: Any, *args: Any, **kwargs: Any) -> Any:
        rows = inner(table, *args, **kwargs)
        read.update(table.column("prompt").to_pylist() if "prompt" in table.column_names else ())
        return rows

    monkeypatch.setattr(arrow_dataset, "format_table", counted)
    data = prompts(40)
    texts = [*data["prompt"]]
    looked_at = {texts[row] for row in (0, 13, 26, 39)}  # by the check of images
    roomy = {"max_position_embeddings": 1024}
    reads = []
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    for changes in (roomy, roomy | {"rope_parameters": scaled}):
        read.clear()
        make(tmp_path, tiny_model(**changes), train_dataset=data)
        assert {*read} == {*texts}
        reads.append({read[prompt] for prompt in read.keys() - looked_at})
    assert reads == [{1}, {2}]  # the control: the longest sequence decides the frequencies
