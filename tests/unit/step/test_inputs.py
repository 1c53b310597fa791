"""What a loss reads of a user's dictionary is what TRL's padded loss would broadcast."""

import pytest
import torch

from grpo_ext.errors import RolloutError
from grpo_ext.forward.columns import ADVANTAGES, COMPLETION_IDS, OLD_LOGPS, TOOL_MASK
from grpo_ext.forward.rows import TokenRows
from grpo_ext.rollouts.batch import batch_state, saved_batch
from grpo_ext.rollouts.from_trl import gather_scored
from grpo_ext.sampling.turn import Turn
from grpo_ext.step.inputs import loss_columns

LENGTHS = [3, 0, 2]
ROWS = TokenRows(torch.arange(8), [1, 1, 1], LENGTHS, [False, False])
TOKENS = torch.arange(12.0).view(3, 4)
SHORT = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        (ADVANTAGES, TOKENS, [0, 1, 2, 8, 9]),
        (ADVANTAGES, TOKENS[:1], [0, 1, 2, 0, 1]),
        (ADVANTAGES, TOKENS[:1, :3], [0, 1, 2, 0, 1]),  # as many tokens as rows
        (ADVANTAGES, torch.tensor([1.0, 2.0, 3.0]), [[1], [2], [3]]),
        (ADVANTAGES, torch.tensor([[1.0], [2.0], [3.0]]), [[1], [2], [3]]),
        (ADVANTAGES, torch.tensor([2.0]), [[2], [2], [2]]),
        (ADVANTAGES, torch.tensor([[2.0]]), [[2], [2], [2]]),
        (ADVANTAGES, torch.tensor(2.0), [[2], [2], [2]]),
        (TOOL_MASK, torch.tensor([[1], [1], [0]]), [1, 1, 1, 0, 0]),
        (OLD_LOGPS, torch.tensor([[1.0], [2.0], [3.0]]), [1, 1, 1, 3, 3]),
        (OLD_LOGPS, SHORT, [1, 2, 0, 5, 6]),  # made longer by an override
        (TOOL_MASK, SHORT[:, :2] * 0, [0, 0, 1, 0, 0]),
    ],
)
def test_values_broadcast_over_rows_and_tokens(name, values, expected):
    found = loss_columns({name: values}, ROWS)
    assert found[name].tolist() == expected
    assert found["completion_mask"].tolist() == [1] * 5
    assert found["lengths"].tolist() == LENGTHS


def scored(**changes):
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    parts = {"prompt_ids": ids, "prompt_mask": torch.ones_like(ids), COMPLETION_IDS: ids, "completion_mask": mask}
    return {**parts, ADVANTAGES: torch.tensor([1.0, -1.0]), **changes}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.int64])
def test_masks_of_a_user_keep_their_type_also_in_a_checkpoint(dtype):
    given = scored()
    batch = gather_scored(scored(completion_mask=given["completion_mask"].to(dtype)), 2, 2)
    for one in (batch, saved_batch(batch_state(batch))):
        assert one.as_trl(0)["completion_mask"].dtype == dtype
        assert one.completions.lengths == [3, 2]


def test_a_name_that_the_trainer_uses_itself_is_refused():
    with pytest.raises(RolloutError, match="returned experts, a name that the trainer uses itself"):
        gather_scored(scored(experts=torch.ones(2)), 2, 2)
    assert gather_scored(scored(attended=torch.ones(2)), 2, 2)["attended"].tolist() == [1.0, 1.0]


def test_log_probabilities_of_a_turn_may_be_a_tensor():
    assert Turn.of([5, 6], torch.tensor([-1.0, -2.0])).logps == [-1.0, -2.0]  # type: ignore[arg-type]
    assert Turn.of([5, 6], [-1.0, None]).logps == [-1.0, None]
    assert Turn.of([5, 6], None).logps is None
