"""The rollout batch: what is stored is what was scored, and a micro-batch has of it what TRL would hand over."""

import pytest
import torch

from grpo_ext.errors import RolloutError
from grpo_ext.rollouts.from_trl import gather_scored
from tests.support.batches import batch_of_rows

ADVANTAGES = torch.tensor([0.5, -1.5, 2.0, 0.0])
PROMPTS, COMPLETIONS = [[3, 4, 5], [6], [7, 8, 9, 2], [4, 5]], [[5, 6], [7, 8, 9, 5, 6], [8], [9, 3, 4]]


def test_rows_are_padded_to_the_longest_of_them_with_neutral_values():
    tool_mask = [[1, 0], [1, 0, 0, 1, 1], [1], [1, 0, 0]]
    names = ("old_per_token_logps", "importance_sampling_ratio")
    tokens = {name: [[2.0] * len(ids) for ids in COMPLETIONS] for name in names}
    rollout = batch_of_rows(PROMPTS, COMPLETIONS, ADVANTAGES, 2, tool_mask=tool_mask, **tokens)
    assert [mask.tolist() for mask in rollout.loss_masks] == tool_mask
    batch = rollout.select([3, 0]).as_trl(0)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "prompt_ids": [[0, 4, 5], [3, 4, 5]],
        "prompt_mask": [[0, 1, 1], [1, 1, 1]],
        "completion_ids": [[9, 3, 4], [5, 6, 0]],
        "completion_mask": [[1, 1, 1], [1, 1, 0]],
        "tool_mask": [[1, 0, 0], [1, 0, 1]],
        "old_per_token_logps": [[2.0, 2.0, 2.0], [2.0, 2.0, 0.0]],
        "importance_sampling_ratio": [[2.0, 2.0, 2.0], [2.0, 2.0, 1.0]],
        "advantages": [0.0, 0.5],
    }


def test_missing_fields_of_the_loss_are_named():
    scored = batch_of_rows(PROMPTS, COMPLETIONS, ADVANTAGES, 2).as_trl(0)
    with pytest.raises(RolloutError, match="returned no prompt_mask, advantages; the loss needs them"):
        gather_scored(scored | {"prompt_mask": None, "advantages": None}, 4, 2)
