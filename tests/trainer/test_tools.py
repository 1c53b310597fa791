"""Tools and environments that hang or do not fit: the run goes on without them, or is refused before it begins."""

import contextlib
import json
import logging
import time
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from grpo_ext.errors import ConfigError, DataError
from tests.support.colocated import stand_in
from tests.support.tiny import prompts, tiny_model, tiny_tokenizer
from tests.support.tool_runs import Game, always_calling, count, sampled
from tests.support.trainers import log_of, make

SECONDS = 0.1


def trainer_with(folder, called=("count",), **changes):
    parts = {**always_calling(), "tools": None, "processing_class": sampled(lambda ids: list(called))}
    parts |= {"max_completion_length": 150, "rollout_chunk_size": None}
    return make(folder, tiny_model(max_position_embeddings=4096), **{**parts, **changes})


def test_an_environment_whose_call_hangs_is_used_no_more(tmp_path, caplog):
    made = []

    class Stuck(Game):
        def __init__(self):
            made.append(self)
            self.asked = 0

        def stall(self, number: int) -> str:
            """Stall.

            Args:
                number: Not used.
            """
            if self is made[0]:
                time.sleep(60)
            return "moved"

        def get_reward(self):
            self.asked += 1
            return super().get_reward()

    with caplog.at_level(logging.WARNING):
        trainer = trainer_with(
            tmp_path, ("stall", "count"), environment_factory=Stuck, tool_timeout=SECONDS, max_steps=2
        )
        trainer.train()
    # the second call of the transcript is refused at once; the next rollout has another environment
    assert log_of(trainer, "tools/failure_frequency")[0] > 0
    assert log_of(trainer, "tools/failure_frequency")[1] == 0
    assert made[0] not in trainer._environment_pool[None]
    assert [environment.asked for environment in made] == [0] + [2] * 7 + [1]
    assert caplog.text.count("is replaced before the next rollout") == 1


BAD = [
    ({"tools": [count, count]}, ConfigError, r"these are named \['count', 'count'\]"),
    ({"tools": [count], "processing_class": tiny_tokenizer()}, ConfigError, "this tokenizer has no chat template;"),
    ({"tools": [count], "processing_class": tiny_tokenizer(chat=True)}, ConfigError, "has one that leaves them out;"),
    ({"environment_factory": {"a": Game}}, DataError, "environment=None, by its column"),
    ({"tools": [count], "train_dataset": prompts(8)}, DataError, "lists of messages"),
]


@pytest.mark.parametrize(("given", "error", "words"), BAD, ids=[words for *_, words in BAD])
def test_what_cannot_work_is_refused_before_training(tmp_path, given, error, words):
    with pytest.raises(error, match=words):
        trainer_with(tmp_path, **given)


@pytest.mark.parametrize("engines", [1, 2])
def test_vllm_that_cuts_what_processes_sampled_together_is_refused(tmp_path, monkeypatch, engines):
    stand_in(monkeypatch.setattr)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setattr(torch.distributed, "new_subgroups_by_enumeration", lambda ranks: (None, None))
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": engines, "top_k": 0}
    refused = pytest.raises(ConfigError, match="tools or an environment on 2 processes: vLLM cuts")
    with refused if engines == 2 else contextlib.nullcontext():
        trainer_with(tmp_path, tools=[count], **settings)


@pytest.mark.full
def test_whatever_a_parser_raises_the_completion_is_a_text(tmp_path, caplog):
    tokenizer = sampled(lambda ids: ["count"])
    calls, numbers = tokenizer.parse_response, iter(range(10**6))

    def parse_response(ids: list[int], **options: Any) -> Any:
        match next(numbers) % 4:
            case 0:
                return calls(ids, **options)
            case 1:
                return json.loads("[" * 10**5)  # too deep for Python's stack
            case 2:
                return {"tool_calls": {}["name"]}
            case 3:
                return ["a list is not a message"]

    tokenizer.parse_response = parse_response
    shown = []

    def reward(completions, **kwargs):
        shown.extend(completions)
        return [0.0] * len(completions)

    limits = {"max_tool_calling_iterations": 1, "rollout_chunk_size": 8, "max_steps": 1}
    with caplog.at_level(logging.WARNING):
        trainer_with(tmp_path, tools=[count], processing_class=tokenizer, reward=reward, **limits).train()
    first, texts = shown[0], shown[1:4]  # the other texts call nothing
    assert [message["role"] for message in first[:2]] == ["assistant", "tool"]
    assert [[message["role"] for message in text] for text in texts] == [["assistant"]] * 3
    assert all(text[0]["content"] for text in texts)
    for kind in ("RecursionError", "KeyError", "AttributeError"):
        assert caplog.text.count(f"parser of responses raises {kind}") == 1
