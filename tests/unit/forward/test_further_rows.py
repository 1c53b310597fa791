"""Rows of a completion, as columns and back."""

import itertools
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given

from grpo_ext.forward.further_rows import FurtherRow, Row, decoded, encoded


@st.composite
def completions(draw: Any) -> tuple[list[int], list[int], list[FurtherRow]]:
    """A prompt, ids, and further rows whose contexts often repeat parts of earlier rows."""
    ids_of = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    prompt, ids = draw(ids_of), draw(ids_of)
    starts = sorted(draw(st.sets(st.integers(0, len(ids) - 1), max_size=4)))
    further, before = list[FurtherRow](), [*prompt, *ids[: starts[0] if starts else len(ids)]]
    for start in starts:
        context = draw(st.one_of(ids_of, st.just(before[: draw(st.integers(1, len(before)))])))
        further.append(FurtherRow(start, [*context, *draw(st.lists(st.integers(0, 2), max_size=2))]))
        before = [*further[-1].context, *ids[start:]]
    return prompt, ids, further


def equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def rows_of(prompt: list[int], ids: list[int], further: list[FurtherRow]) -> list[Row]:
    columns = prompt, ids, *encoded(prompt, ids, further)
    return decoded(*(torch.tensor(values, dtype=torch.int32) for values in columns))


@given(completions())
def test_every_token_is_in_one_row_in_its_context(completion):
    prompt, ids, further = completion
    rows = rows_of(*completion)
    starts = [0, *(row.start for row in further), len(ids)]
    expected = list(zip([prompt, *(row.context for row in further)], itertools.pairwise(starts), strict=True))
    expected = expected if starts[1] else expected[1:]  # a first row without tokens does not run
    assert len(rows) == len(expected)
    earlier = list[list[int]]()
    for row, (context, (start, stop)) in zip(rows, expected, strict=True):
        assert [*row.prompt.tolist(), *row.context.tolist()] == context
        assert (row.start, row.stop) == (start, stop)
        assert row.shares == (context[: len(prompt)] == prompt)
        assert row.prompt.tolist() == (prompt if row.shares else context)
        whole = [*context, *ids[start:stop]]
        assert torch.cat(row.ids(torch.tensor(ids))).tolist() == whole
        assert row.size == (len(row.prompt), len(whole) - len(row.prompt), row.shares)
        same = [len([*itertools.takewhile(equal, zip(context, other))]) for other in earlier]
        assert row.repeated == max(same, default=0)
        earlier.append(whole)


def test_only_what_no_earlier_row_begins_with_is_stored():
    prompt, ids = [1, 2], [3, 4, 5, 6]
    numbers, rest = encoded(prompt, ids, [FurtherRow(2, [1, 2, 3, 9]), FurtherRow(3, [1, 2, 3, 9, 5])])
    assert numbers == [2, 0, 3, 1, 3, 1, 5, 0]
    assert rest == [9]
    assert encoded(prompt, ids, []) == ([], [])


def test_a_first_row_without_tokens_does_not_run():
    (row,) = rows_of([1, 2], [3, 4], [FurtherRow(0, [7, 2])])
    assert (row.prompt.tolist(), row.shares, row.start, row.stop, row.repeated) == ([7, 2], False, 0, 2, 0)
