"""Which rows that a `rollout_func` returned are joined, which are left out, and what a completion has of them."""

from typing import Any

import pytest

from grpo_ext.forward.columns import KEPT_COUNTS, KEPT_IDS, SAMPLING_LOGPS
from grpo_ext.forward.further_rows import FurtherRow
from grpo_ext.sampling.returned_rows import ReturnedRow, chains_of, continues, turn_of_rows

PROMPT = [1, 2, 3]


def row(context: list[int], ids: list[int], mask: list[int] | None = None, logps: Any = None, kept: Any = None) -> Any:
    return ReturnedRow(context, ids, logps, mask, kept)


def counts(**expected: int) -> dict[str, int]:
    return {"context_tokens": 0, "untrained_tokens": 0, **expected}


def test_a_row_continues_another_whose_tokens_its_context_begins_with():
    first = row(PROMPT, [4, 5])
    assert continues(row([*PROMPT, 4, 5], [6]), first)
    assert continues(row([*PROMPT, 4, 5, 9], [6]), first)
    assert not continues(row([*PROMPT, 4], [5]), first)
    assert not continues(row([*PROMPT, 4, 6], [5]), first)
    assert not continues(row(PROMPT, [4, 5]), first)  # the same call again is another sample


def test_rows_that_continue_each_other_are_one_row_with_what_others_wrote_between():
    turn = turn_of_rows([row(PROMPT, [4, 5]), row([*PROMPT, 4, 5, 9, 9], [6]), row([*PROMPT, 4, 5, 9, 9, 6], [7])])
    assert turn.prompt_ids == PROMPT
    assert turn.ids == [4, 5, 9, 9, 6, 7]
    assert turn.mask == [1, 1, 0, 0, 1, 1]
    assert not turn.further
    assert (turn.returned.ids, turn.returned.last_ids) == ([4, 5, 6, 7], [7])
    assert turn.returned.last_context == [*PROMPT, 4, 5, 9, 9, 6]
    assert turn.returned.counts == counts(rows=1, longest=9)


def test_a_row_is_joined_to_the_longest_that_it_continues():
    longest, fork = row([*PROMPT, 4], [5, 6]), row(PROMPT, [4, 5])
    last = row([*PROMPT, 4, 5, 6], [7])
    assert [chain.ids for chain in chains_of([fork, longest, last])] == [[4, 5], [5, 6, 7]]
    assert [chain.ids for chain in chains_of([fork, fork, last])] == [[4, 5, 6, 7], [4, 5]]


def test_rows_that_do_not_continue_are_further_rows_in_their_order():
    rows = [row(PROMPT, [4, 5]), row([*PROMPT, 5], [6]), row(PROMPT, [4, 5]), row([7, 2, 3], [8, 9])]
    turn = turn_of_rows(rows)
    assert turn.ids == [4, 5, 6, 4, 5, 8, 9]
    assert turn.further == [FurtherRow(2, [*PROMPT, 5]), FurtherRow(3, PROMPT), FurtherRow(5, [7, 2, 3])]
    assert turn.mask is None
    assert turn.returned.counts == counts(rows=4, longest=5, context_tokens=4 + 3 + 3)
    assert (turn.returned.last_context, turn.returned.last_ids) == ([7, 2, 3], [8, 9])


def test_rows_that_are_not_trained_are_counted_and_left_out():
    rows = [row(PROMPT, [4], [0]), row([7], [5]), row([8], []), row([9, 9], [6, 6], [0, 0])]
    turn = turn_of_rows(rows)
    assert turn.prompt_ids == PROMPT  # that of the first row, also where that does not run
    assert turn.ids == [5]
    assert turn.further == [FurtherRow(0, [7])]
    assert (turn.returned.ids, turn.returned.last_ids) == ([4, 5, 6, 6], [6, 6])
    assert turn.last_ids == [5]  # the last call decides whether the rollout ended, not what followed it
    assert turn.returned.counts == counts(rows=1, longest=2, context_tokens=1, untrained_tokens=3)


@pytest.mark.parametrize(
    ("rows", "stands"),
    [
        ([row(PROMPT, [4, 5], [0, 0], [-1.0, -2.0], [[4], [5]]), row([7], [8], [0], [-1.0], [[8]])], 5),
        ([row(PROMPT, [], None, [], []), row([7], [8], [0], [-1.0], [[8]])], 3),
    ],
    ids=["tools", "empty"],
)
def test_one_token_stands_for_a_rollout_that_is_not_trained(rows, stands):
    turn = turn_of_rows(rows)
    assert (turn.prompt_ids, turn.ids, turn.mask, turn.further) == (PROMPT, [stands], [0], [])
    assert turn.columns[SAMPLING_LOGPS].tolist() == [0.0]
    assert turn.columns[KEPT_COUNTS].tolist() == [0]
    tokens = sum(len(r.ids) for r in rows)
    assert turn.returned.counts == counts(rows=1, longest=4, untrained_tokens=tokens)


def test_log_probabilities_and_ids_that_were_sampled_from_follow_their_tokens():
    rows = [
        row(PROMPT, [4, 5], [1, 1], [-1.0, None], [[4, 6], []]),
        row([*PROMPT, 4, 5, 9], [6], None, [-3.0], [[6, 7]]),
        row([8], [7], None, [-4.0], [[7]]),
    ]
    turn = turn_of_rows(rows)
    assert turn.ids == [4, 5, 9, 6, 7]
    assert turn.logps == [-1.0, None, 0.0, -3.0, -4.0]
    assert turn.columns[KEPT_COUNTS].tolist() == [2, 0, 0, 2, 1]
    assert turn.columns[KEPT_IDS].tolist() == [4, 6, 6, 7, 7]
    unknown = [r._replace(logps=None, kept_ids=None) for r in rows]
    assert turn_of_rows(unknown).logps is None
    assert turn_of_rows(unknown).columns == {}


def test_a_rollout_of_one_row_is_that_row():
    one = row(PROMPT, [4, 5], [0, 1], [-1.0, -2.0])
    turn = turn_of_rows([one])
    assert (turn.ids, turn.mask, turn.prompt_ids, turn.logps) == (one.ids, one.mask, PROMPT, one.logps)
    assert not turn.further
