"""A `rollout_func` that returns something else than completions is an error that says what, on every process."""

from __future__ import annotations

import contextlib
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_ext.errors import RolloutError
from grpo_ext.sampling import rollout_func as module
from grpo_ext.sampling.rollout_func import CheckedRollout

TRAINER = SimpleNamespace()
REMEMBERED: list[Any] = []
GOOD = {"prompt_ids": [[3], [4]], "completion_ids": [[5, 1], [6, 1]], "logprobs": None}


def call(output: Any, needs: str | None = None, why_equal: str | None = None) -> Any:
    function = output if callable(output) else lambda prompts, trainer: output

    def remember(rows: Any, prompts: Any, completions: Any) -> Any:
        REMEMBERED.append((prompts, completions))
        return completions

    scoring = SimpleNamespace(remember=remember)
    sampler = SimpleNamespace(call=scoring, why_equal=why_equal, outside=contextlib.nullcontext)
    return CheckedRollout(function, lambda: sampler, needs)(["a", "b"], TRAINER)


def test_what_is_right_goes_through_as_it_is():
    assert call(GOOD) == GOOD
    assert REMEMBERED[-1] == (GOOD["prompt_ids"], GOOD["completion_ids"])  # for tools that go on with the rows
    more = {**GOOD, "logprobs": [[-1.0, -2.0], [-1.0, None]], "env_mask": [[1, 0], [1, 1]], "score": [0.5, 1.0], "k": 3}
    assert call(more) == more


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple])
def test_tensors_and_arrays_become_plain_numbers(kind):
    mask = [[True, False], [1.0, 1.0]]
    given = {**GOOD, "completion_ids": kind([[5, 1], [6, 1]]), "logprobs": kind([[-1, -2], [-1, -2]]), "env_mask": mask}
    found = call(UserDict(given))
    assert found["completion_ids"] == [[5, 1], [6, 1]]
    assert found["env_mask"] == [[1, 0], [1, 1]]
    assert {type(value) for row in found["completion_ids"] + found["env_mask"] for value in row} == {int}
    assert {type(value) for row in found["logprobs"] for value in row} == {float}


def test_a_mask_that_is_none_is_no_mask():
    assert "env_mask" not in call({**GOOD, "env_mask": None})


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (None, "a NoneType in the place of a dictionary"),
        ({"prompt_ids": [[3], [4]]}, "no completion_ids, logprobs"),
        ({**GOOD, "completion_ids": [[5, 1]]}, "1 completion_ids for 2 prompts"),
        ({**GOOD, "prompt_ids": [[3]] * 3}, "3 prompt_ids for 2 prompts"),
        ({**GOOD, "score": [1.0]}, "1 score for 2 prompts"),
        ({**GOOD, "completion_ids": [[5, 1], []]}, "no tokens in row 1 of completion_ids"),
        ({**GOOD, "logprobs": [[-1.0], [-1.0, -1.0]]}, "1 logprobs for the 2 tokens of completion 0"),
        ({**GOOD, "logprobs": [None, [-1.0, -1.0]]}, "None logprobs for the 2 tokens of completion 0"),
        ({**GOOD, "env_mask": [[1, 1], [1]]}, "1 env_mask for the 2 tokens of completion 1"),
    ],
)
def test_what_is_wrong_is_said_with_the_rule(output, says):
    with pytest.raises(RolloutError, match=rf"returned {says}.*one list of token ids for each prompt"):
        call(output)


def test_an_exception_is_named_and_kept_as_the_cause():
    def broken(prompts: Any, trainer: Any) -> Any:
        raise ConnectionError("no sandbox")

    with pytest.raises(RolloutError, match="raised ConnectionError: no sandbox") as caught:
        call(broken)
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_log_probabilities_may_be_needed():
    with pytest.raises(RolloutError, match="returned logprobs=None, and the correction wants them"):
        call(GOOD, needs="the correction wants them")


def beside(monkeypatch: Any, *others: tuple[str | None, bool, bool]) -> None:
    monkeypatch.setattr(module, "gather_lists", lambda own: [*own, *others])


def test_a_failure_of_another_process_is_an_error_here_too(monkeypatch):
    beside(monkeypatch, ("raised KeyError: 'x'", False, False))
    with pytest.raises(RolloutError, match="on process 1, rollout_func raised KeyError: 'x'"):
        call(GOOD)


def test_log_probabilities_on_some_processes_alone_are_refused(monkeypatch):
    beside(monkeypatch, (None, True, False))
    with pytest.raises(RolloutError, match="logprobs on some processes and None on others"):
        call(GOOD)


def test_a_mask_on_another_process_means_tokens_of_the_model_here(monkeypatch):
    beside(monkeypatch, (None, False, True))
    assert call(GOOD)["env_mask"] == [[1, 1], [1, 1]]


def test_where_generation_is_a_collective_processes_need_as_many_prompts(monkeypatch):
    monkeypatch.setattr(module, "gather_lists", lambda own: [*own, 1] if own == [2] else own)
    with pytest.raises(RolloutError, match="would get 1 to 2 prompts on this number of processes, and they are joined"):
        call(GOOD, why_equal="they are joined")
    monkeypatch.setattr(module, "gather_lists", lambda own: [*own, *own])
    assert call(GOOD, why_equal="they are joined") == GOOD


def test_it_shows_what_the_users_object_has():
    class Sandbox:
        env = "inner"

        def __call__(self, prompts: Any, trainer: Any) -> Any:
            return GOOD

    checked = CheckedRollout(Sandbox(), lambda: None)
    assert checked.env == "inner"
    with pytest.raises(AttributeError):
        _ = checked.nothing
