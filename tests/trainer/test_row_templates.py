"""Settings of the chat template in a row of the data: a column `chat_template_kwargs`, as in TRL's SFT and DPO."""

from typing import Any

import pytest
from datasets import Dataset

from grpo_ext.errors import DataError, GrpoExtError
from tests.parity.scripts import EOS, TEMPLATE, call, chat_tokenizer, scripted_model
from tests.support.tiny import given_rollout, prompts, tiny_model, tiny_tokenizer, tool
from tests.support.trainers import make, ran

THINKING = TEMPLATE.replace("<model>{% endif %}", "<model>{% if think is false %}-{% endif %}{% endif %}")
KWARGS = [{"think": True}, {"think": False}, None, {"style": "curt"}]  # a data set fills in what a row lacks


@tool
def count(number: int) -> str:
    return str(number)


def as_long(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(str(text))) for text in completions]


def data(kwargs: Any = KWARGS) -> Dataset:
    """One prompt in rows that differ in nothing but their settings."""
    messages = [{"role": "user", "content": "abc"}]
    return Dataset.from_dict({"prompt": [messages] * len(kwargs), "chat_template_kwargs": kwargs})


def parts(shown: list[str], **changes: Any) -> dict[str, Any]:
    """Completions that call a tool in their first turn; `shown`: the text before each turn."""

    def reply(turn: int, place: int, text: str) -> str:
        shown.append(text)
        return (call("count", number=place) if turn == 0 else "ab"[place % 2]) + EOS

    tokenizer = chat_tokenizer()
    tokenizer.chat_template = THINKING
    usual = {"processing_class": tokenizer, "tools": [count], "max_completion_length": 200, "max_steps": 1}
    return {"model": scripted_model(tokenizer, reply), "reward": as_long, "train_dataset": data(), **usual, **changes}


def expected(trainer: Any, **kwargs: Any) -> str:
    messages = [{"role": "user", "content": "abc"}]
    options = {"tools": [count], "add_generation_prompt": True, "tokenize": False}
    return str(trainer.processing_class.apply_chat_template(messages, **options, **kwargs))


@pytest.mark.parametrize("evaluates", [False, True])
def test_each_row_is_rendered_with_its_own_settings_in_every_turn(tmp_path, evaluates):
    shown: list[str] = []
    changes = {"eval_dataset": data(), "per_device_eval_batch_size": 8} if evaluates else {}
    trainer = make(tmp_path, **parts(shown, chat_template_kwargs={"style": "mild"}, **changes))
    trainer.evaluate() if evaluates else trainer.train()
    starts = [
        expected(trainer, **{"style": "mild", **(kwargs or {})})
        for kwargs in KWARGS  # a row's setting comes before the trainer's
    ]
    first = [text for text in shown if "<tool>" not in text]
    assert sorted(set(first)) == sorted(set(starts))
    later = [text for text in shown if "<tool>" in text]
    assert len(first) == len(later) == 16
    for text in later:
        assert text.startswith(tuple(starts))
        without = text.startswith(starts[1])
        assert text.endswith("<model>-" if without else "<model>")
    assert sum(text.endswith("<model>-") for text in later) == 4


def test_without_the_column_every_row_has_the_settings_of_the_run(tmp_path):
    shown: list[str] = []
    rows = data().remove_columns("chat_template_kwargs")
    trainer = ran(make(tmp_path, **parts(shown, chat_template_kwargs={"think": False}, train_dataset=rows)))
    assert {text for text in shown if "<tool>" not in text} == {expected(trainer, think=False)}


REFUSED = {
    "rollout_func. It would be ignored": {"rollout_func": given_rollout, "tools": None},
    "remove_unused_columns. It would be ignored": {"remove_unused_columns": True},
    "chat_template_kwargs='think' in a row": {"train_dataset": data(["think", "think"])},
    "in a row of the data: tokenize cannot be set by a row": {"train_dataset": data([{"tokenize": False}] * 2)},
    "a template is not applied to a prompt that is a text": {
        **{"tools": None, "processing_class": tiny_tokenizer(), "model": tiny_model()},
        "train_dataset": prompts(2).add_column("chat_template_kwargs", [{"think": True}] * 2),
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_ignore_the_column_is_refused(tmp_path, words):
    with pytest.raises(GrpoExtError, match=words):
        make(tmp_path, **parts([], **REFUSED[words]))


def test_a_template_that_does_not_take_a_row_is_named_with_it(tmp_path):
    strict = THINKING + "{% if think is true %}{{ raise_exception('no thinking') }}{% endif %}"
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = strict
    with pytest.raises(DataError, match=r"row 0 of the evaluation data set: the chat template .*no thinking"):
        make(tmp_path, **parts([], processing_class=tokenizer, train_dataset=data(KWARGS[1:]), eval_dataset=data()))
