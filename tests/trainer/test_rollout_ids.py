"""What a `rollout_func` with `rollout_ids` means beside the update: rewards, limits, log, what is refused."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_ext
from grpo_ext.errors import RolloutError
from grpo_ext.run.diff import diff
from tests.support.drop_in import conversations, tool_tokenizer
from tests.support.images import image_model, image_processor, image_rows
from tests.support.several_rows import Agent, Row
from tests.support.tiny import given_rollout, prompts, tiny_model, tiny_tokenizer
from tests.support.tool_runs import always_calling
from tests.support.trails import first_of
from tests.support.trainers import batches_of, log_of, make, parameters, passing_on, ran, train_and_keep_first

SIZES = {"max_steps": 1, "max_completion_length": 24, "num_generations": 4, "global_batch_size": 16}
END = 1


def agent_of(*rows_of: Any) -> Agent:
    return Agent(kinds=[lambda prompt, source, rows=rows: rows(prompt) for rows in rows_of])


def trainer_of(folder: Any, agent: Any, **settings: Any) -> Any:
    return make(folder, **{"rollout_func": agent, "reward": agent.reward, **SIZES, **settings})


def two(prompt: list[int]) -> list[Row]:
    """A row with a tool's answer, and one that does not extend it."""
    return [Row(prompt, [4, 5, 6], [1, 1, 0]), Row([*prompt, 6], [7, END], [1, 1])]


def one(prompt: list[int]) -> list[Row]:
    return [Row(prompt, [8, 9], [1, 1])]


def joined(prompt: list[int]) -> list[Row]:
    return [Row(prompt, [4], [1]), Row([*prompt, 4, 6], [7], [1]), Row([9], [5, 5], [0, 0]), Row(prompt, [], [])]


def test_a_reward_function_is_called_once_for_each_rollout(tmp_path):
    agent = agent_of(two, one, joined)
    ran(trainer_of(tmp_path, agent))
    calls = {name: [value for call in agent.rewarded for value in call[name]] for name in ("completion_ids", "answer")}
    texts = [text for call in agent.rewarded for text in call["completions"]]
    assert len(texts) == len(calls["answer"]) == 16
    assert calls["completion_ids"][:3] == [[4, 5, 6, 7, END], [8, 9], [4, 7, 5, 5]]
    # the text of the last row that has tokens
    assert texts[:3] == [tiny_tokenizer().decode(ids, skip_special_tokens=True) for ids in ([7], [8, 9], [5, 5])]


def test_completions_of_conversations_are_the_last_rows_message(tmp_path):
    agent = agent_of(two, one, joined)
    agent.ids_of = lambda prompt, trainer: trainer.processing_class(prompt[0]["content"])["input_ids"]
    ran(trainer_of(tmp_path, agent, train_dataset=conversations(), processing_class=tiny_tokenizer(chat=True)))
    messages = [message for call in agent.rewarded for message in call["completions"]]
    text = tiny_tokenizer().decode([7])
    assert messages[0] == [{"role": "assistant", "content": text}]


def test_a_rollout_is_truncated_if_its_last_call_was(tmp_path):
    def cut_off(prompt: list[int]) -> list[Row]:
        first, second = two(prompt)
        return [first._replace(ids=[4, 5, END]), second._replace(ids=[7, 8])]

    trainer = trainer_of(tmp_path, agent_of(two, cut_off), mask_truncated_completions=True)
    batch = train_and_keep_first(trainer)
    assert log_of(trainer, "completions/clipped_ratio") == [0.5]
    assert [int(mask.sum()) for mask in batch.loss_masks] == [4, 0] * 8
    assert [len(row) for row in batch.completions] == [5, 0] * 8


def test_the_log_counts_rows_and_contexts_by_rollout(tmp_path):
    trainer = ran(trainer_of(tmp_path / "rows", agent_of(two, one, joined, one), train_dataset=prompts(4)))
    lengths = [len(prompt) for prompt in prompts(4)["prompt"]]
    (rows,), (context,), (untrained,) = (
        log_of(trainer, f"rollout/{name}") for name in ("rows", "context_tokens", "untrained_tokens")
    )
    assert rows == (2 + 1 + 1 + 1) / 4
    assert context == pytest.approx(sum(length + 1 for length in lengths) / 16)
    assert untrained == 2 / 4
    assert log_of(trainer, "completions/mean_length") == [(4 + 2 + 2 + 2) / 4]  # tokens of the model
    before = ran(make(tmp_path / "none", rollout_func=given_rollout, **SIZES))
    assert not any(name.startswith("rollout/") for line in before.state.log_history for name in line)


def test_rollout_ids_one_to_one_are_as_none(tmp_path):
    def numbered(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return given_rollout(prompts, trainer) | {"rollout_ids": [*range(len(prompts))]}

    runs = [
        make(tmp_path / function.__name__, rollout_func=function, **{**SIZES, "max_steps": 2})
        for function in (given_rollout, numbered)
    ]
    batches = [batches_of(run) for run in runs]
    without, with_ids = (parameters(ran(run)) for run in runs)
    assert torch.equal(without, with_ids)
    for plain, other in zip(*batches, strict=True):
        assert plain.columns.keys() == other.columns.keys()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            lambda prompt: [Row(prompt, [4] * 13, [1] * 13), Row([9], [5] * 12, [0] * 12)],
            "returned 25 tokens of the model and of tools in the rows of a rollout, and max_completion_length=24",
        ),
        (
            lambda prompt: [Row(prompt, [4], [1]), Row([9] * 32, [5] * 3, [1] * 3)],
            r"returned a row of 35 tokens, context included, in completion 0; .* longest prompt \(10\) and "
            "max_completion_length=24 together",
        ),
    ],
    ids=["rollout", "row"],
)
def test_what_is_longer_than_the_limits_is_refused_with_its_numbers(tmp_path, rows, says):
    with pytest.raises(RolloutError, match=says):
        ran(trainer_of(tmp_path, agent_of(rows)))


def test_what_is_as_long_as_the_limits_trains(tmp_path):
    longest = max(map(len, prompts(12)["prompt"]))
    agent = agent_of(lambda prompt: [Row(prompt, [4] * 12, [1] * 12), Row([9] * (longest + 12), [5] * 12, [1] * 12)])
    assert ran(trainer_of(tmp_path, agent)).state.global_step == 1


OVERRIDES = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies", "_generate_and_score_completions")
REFUSED: dict[str, Any] = {
    **{name: lambda name=name: {"cls": passing_on(name)} for name in OVERRIDES},
    "images": lambda: {
        **{"model": image_model("llava"), "processing_class": image_processor("llava"), "train_dataset": image_rows(4)},
    },
    "tools": always_calling,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_one_row_refuses_several_with_its_reason(tmp_path, name):
    says = {"images": "takes images, which belong to the one row", "tools": "tools append to a completion's only row"}
    expected = says.get(name, f"{name} is overridden: TRL's dictionary, which it is given, has one row for each")
    several, single = agent_of(two), agent_of(one)
    several.ids_of = single.ids_of = lambda prompt, trainer: [5, 6]
    with pytest.raises(
        RolloutError, match=f"rollout_func returned rows of prompt 0 that do not continue each other, and .*{expected}"
    ):
        ran(trainer_of(tmp_path / "several", several, **REFUSED[name]()))
    if name != "images":  # these prompts have no image tokens
        assert ran(trainer_of(tmp_path / "single", single, **REFUSED[name]())).state.global_step == 1


def test_diff_tells_the_same_tokens_in_other_contexts(tmp_path):
    def other_context(prompt: list[int]) -> list[Row]:
        first, second = two(prompt)
        return [first, second._replace(prompt_ids=[*prompt, 5])]

    folders = [tmp_path / name for name in ("run", "again", "other")]
    for folder, rows in zip(folders, (two, two, other_context), strict=True):
        ran(trainer_of(folder, agent_of(rows)))
    assert diff(*folders[:2]).first is None
    assert first_of(diff(folders[0], folders[2])) == ("completions", 1)


@pytest.mark.full
def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    page = (Path(grpo_ext.__file__).parents[1] / "docs" / "several-rows.md").read_text()
    (script,) = re.findall(r"```python\n(# agent\.py.*?)```", page, re.S)
    smaller = {
        "=1024,": "=120,",
        '"max_new_tokens": 256': '"max_new_tokens": 8',
        "max_steps=100": "max_steps=1, use_cpu=True, bf16=False",
    }
    for before, after in smaller.items():
        assert script.count(before) == 1
        script = script.replace(before, after)
    tokenizer = tool_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "eos_token_id": tokenizer.eos_token_id}
    tiny_model(**sizes).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["agent.py", str(tmp_path / "model")])
    names: dict[str, Any] = {"__name__": "agent"}
    exec(script, names)
    (rows,) = log_of(names["trainer"], "rollout/rows")
    assert 1 < rows <= 3
