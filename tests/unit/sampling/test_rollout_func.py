"""A `rollout_func` that returns something else than completions is an error that says what, on every process."""

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from grpo_ext.errors import RolloutError
from grpo_ext.sampling.by_user import checked_rollout

GOOD = {"prompt_ids": [[3], [4]], "completion_ids": [[5, 1], [6, 1]], "logprobs": None}


def call(output: Any, kept_ids: bool = False) -> Any:
    return checked_rollout(output, 2, None, kept_ids=kept_ids)


def test_a_valid_rollout_passes_unchanged():
    assert call(GOOD) == GOOD
    more = {**GOOD, "logprobs": [[-1.0, -2.0], [-1.0, None]], "env_mask": [[1, 0], [1, 1]], "score": [0.5, 1.0], "k": 3}
    assert call(more) == more
    assert call({**GOOD, "env_mask": None}) == GOOD


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_tensors_and_arrays_become_plain_numbers(kind):
    mask = [[True, False], [1.0, 1.0]]
    given = {**GOOD, "completion_ids": kind([[5, 1], [6, 1]]), "logprobs": kind([[-1, -2], [-1, -2]]), "env_mask": mask}
    found = call(UserDict(given))
    assert found["completion_ids"] == [[5, 1], [6, 1]]
    assert found["env_mask"] == [[1, 0], [1, 1]]
    assert {type(value) for row in found["completion_ids"] + found["env_mask"] for value in row} == {int}
    assert {type(value) for row in found["logprobs"] for value in row} == {float}


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (None, "a NoneType instead of a dictionary"),
        ({"prompt_ids": [[3], [4]]}, "no completion_ids, logprobs"),
        ({**GOOD, "completion_ids": [[5, 1]]}, "1 completion_ids for 2 prompts"),
        ({**GOOD, "completion_ids": [[5, 1], []]}, "no tokens of prompt or completion in row 1"),
        ({**GOOD, "logprobs": [[-1.0], [-1.0, -1.0]]}, "1 logprobs for the 2 tokens of completion 0"),
        ({**GOOD, "env_mask": [[1, 1], [1]]}, "1 env_mask for the 2 tokens of completion 1"),
        ({**GOOD, "logprobs": [[-1.0, -1.0], None]}, "no logprobs, or an entry that is not a list of numbers"),
        ({**GOOD, "env_mask": [[1, None], [1, 1]]}, "no env_mask, or an entry that is not a list of numbers"),
        ({**GOOD, "prompt_ids": [3, 4]}, "no prompt_ids, or an entry that is not a list of numbers"),
    ],
)
def test_an_invalid_rollout_is_refused_with_the_rule(output, says):
    with pytest.raises(RolloutError, match=rf"returned {says}.*one list of token ids for each prompt"):
        call(output)


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        ({}, "returned no kept_ids"),
        ({"kept_ids": [[[5, 7], []], [[6]]]}, "returned 1 kept_ids for the 2 tokens of completion 1"),
        ({"kept_ids": [[[5, 7], []], [[6], [2, 3]]]}, "do not contain token 1, .* at place 1 of completion 1"),
    ],
)
def test_the_ids_that_tokens_were_sampled_from_are_checked(kept, says):
    with pytest.raises(RolloutError, match=f"{says}.*for each completion one list of ids"):
        call({**GOOD, **kept}, kept_ids=True)
    right = {**GOOD, "kept_ids": [[[5, 7], []], [[6], [1, 3]]]}
    arrays = {**GOOD, "kept_ids": [[np.array([5, 7]), torch.tensor([])], [[6.0], [1, 3]]]}
    assert call(right, kept_ids=True) == call(arrays, kept_ids=True) == right


ROWS = {
    "rollout_ids": [1, 0, 1],
    "prompt_ids": [[4], [3], [4, 9]],
    "completion_ids": [[6], [5, 1], []],
    "logprobs": None,
}


def test_rows_of_rollouts_pass_in_any_order():
    assert call(ROWS) == ROWS
    more = {**ROWS, "logprobs": [[-1.0], [-1.0, None], []], "env_mask": [[1], [0, 1], []], "score": [0.5, 1.0], "k": 3}
    assert call(more) == more
    assert call({**ROWS, "rollout_ids": torch.tensor([1, 0, 1])}) == ROWS
    assert call({**GOOD, "rollout_ids": None}) == GOOD


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout_ids": 1}, r"rollout_ids=1; it has, for each returned row, the number of its prompt, from 0 to 1"),
        ({"rollout_ids": "one"}, r"rollout_ids='one'; it has"),
        ({"rollout_ids": [0.0, 0.5, 1.0]}, r"rollout_ids=\[0.0, 0.5, 1.0\]; it has"),
        ({"rollout_ids": [[0], [1], [1]]}, r"rollout_ids=\[\[0\], \[1\], \[1\]\]; it has"),
        ({"rollout_ids": []}, r"rollout_ids=\[\]; it has"),
        ({"rollout_ids": [0, 1, 2]}, r"rollout_ids=\[0, 1, 2\]; it has"),
        ({"rollout_ids": [0, 1, -1]}, r"rollout_ids=\[0, 1, -1\]; it has"),
        ({"rollout_ids": [1, 1, 1]}, r"no row of the prompts \[0\]; each needs at least one"),
        ({"rollout_ids": [0, 1]}, "3 prompt_ids for 2 rows of rollout_ids"),
        ({"completion_ids": [[6], [5, 1]]}, "2 completion_ids for 3 rows of rollout_ids"),
        ({"logprobs": [[-1.0], [-1.0, -1.0]]}, "2 logprobs for 3 rows of rollout_ids"),
        ({"env_mask": [[1], [1, 1]]}, "2 env_mask for 3 rows of rollout_ids"),
        ({"env_mask": [[1], [1], []]}, "1 env_mask for the 2 tokens of completion 1"),
        ({"score": [0.5, 1.0, 1.0]}, "3 score for 2 prompts"),  # a column of rows, not of rollouts
        ({"prompt_ids": [[4], [3], []]}, "no tokens of prompt or completion in row 2"),
    ],
)
def test_invalid_rows_of_rollouts_are_refused_with_the_rule(changes, says):
    with pytest.raises(RolloutError, match=rf"returned {says}.*rollout_ids names the prompt of each row"):
        call({**ROWS, **changes})


def test_the_ids_that_tokens_of_rows_were_sampled_from_are_checked():
    right = {**ROWS, "kept_ids": [[[6, 7]], [[], [1]], []]}
    assert call(right, kept_ids=True) == right
    with pytest.raises(RolloutError, match="returned 2 kept_ids for 3 rows of rollout_ids"):
        call({**right, "kept_ids": right["kept_ids"][:2]}, kept_ids=True)
