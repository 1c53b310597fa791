"""Rows of any length, the table of columns, and the columns of one completion as it grows."""

import pytest
import torch

from grpo_ext.forward.columns import (
    COLUMNS,
    EXPERTS,
    KEPT_COUNTS,
    KEPT_IDS,
    SAMPLER_LOGPS,
    SAMPLING_LOGPS,
    Rows,
    answered,
    continued,
    first_tokens,
)

LISTS = [[1, 2, 3], [], [4], [4], [5, 6]]


def test_selected_rows_are_those_rows_and_consecutive_ones_share_memory():
    rows = Rows.of(LISTS, torch.int32)
    for places in ([0, 1, 2], [4, 0, 0], [3], []):
        found = rows.select(places)
        assert [row.tolist() for row in found] == [LISTS[place] for place in places]
        assert found.values.dtype == torch.int32
    assert rows.select([2, 3]).values.data_ptr() == rows.values[3:].data_ptr()
    assert rows.select([3, 2]).values.data_ptr() != rows.values[3:].data_ptr()


def test_rows_are_padded_on_a_side_to_a_width_in_multiples():
    rows = Rows.of([[1, 2, 3], [4]])
    assert rows.padded(0, "left", 2).tolist() == [[0, 1, 2, 3], [0, 0, 0, 4]]
    assert rows.padded(9, "right", None, 5).tolist() == [[1, 2, 3, 9, 9], [4, 9, 9, 9, 9]]
    assert Rows.of([[], []]).padded(7, "right").tolist() == [[7], [7]]  # TRL takes the last T columns by `[:, -T:]`


def test_a_state_has_equal_neighbours_once():
    rows = Rows.of(LISTS)
    state = rows.state()
    assert state["values"].tolist() == [1, 2, 3, 4, 5, 6]
    assert [row.tolist() for row in Rows.saved(state)] == LISTS


def test_a_completion_that_grows_has_a_value_of_every_column_for_every_token():
    first = {
        SAMPLER_LOGPS: torch.tensor([-1.0, -2.0]),
        SAMPLING_LOGPS: torch.tensor([-1.5, -2.5]),
        KEPT_COUNTS: torch.tensor([2, 0], dtype=torch.int32),
        KEPT_IDS: torch.tensor([5, 6], dtype=torch.int32),
        EXPERTS: torch.tensor([[0], [1], [2], [3], [-1]]),  # of three tokens before these; the last one never ran
    }
    columns = answered(first, 2)
    assert columns[SAMPLER_LOGPS].tolist() == [-1.0, -2.0, 0.0, 0.0]
    assert columns[KEPT_COUNTS].tolist() == [2, 0, 0, 0]
    assert columns[EXPERTS].flatten().tolist() == [0, 1, 2, 3, -1]
    turn = {
        SAMPLER_LOGPS: torch.tensor([-3.0]),
        KEPT_COUNTS: torch.tensor([1], dtype=torch.int32),
        KEPT_IDS: torch.tensor([7], dtype=torch.int32),
        EXPERTS: torch.tensor([[9], [9], [9], [9], [4], [5], [6], [-1]]),  # all earlier tokens ran again
    }
    grown = continued(columns, turn, 1)
    assert grown[SAMPLER_LOGPS].tolist() == [-1.0, -2.0, 0.0, 0.0, -3.0]
    assert str(grown[SAMPLING_LOGPS].tolist()) == "[-1.5, -2.5, 0.0, 0.0, nan]"
    assert grown[KEPT_IDS].tolist() == [5, 6, 7]
    assert grown[EXPERTS].flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, -1]  # what was recorded first stays
    without = {name: values for name, values in turn.items() if name not in (KEPT_COUNTS, KEPT_IDS)}
    assert KEPT_COUNTS not in continued(columns, without, 1)  # an integer that is unknown has no value
    cut = first_tokens(grown, 3, 1)
    assert {name: values.flatten().tolist() for name, values in cut.items() if name != SAMPLING_LOGPS} == {
        SAMPLER_LOGPS: [-1.0],
        KEPT_COUNTS: [2],
        KEPT_IDS: [5, 6],
        EXPERTS: [0, 1, 2, 3],
    }


@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_what_a_column_says_of_itself_can_be_stored(name):
    kind = COLUMNS[name]
    if kind.dtype is not None:
        assert torch.tensor(kind.neutral).to(kind.dtype).item() == kind.neutral
    if kind.of_rows:
        assert kind.extent == "completion"
