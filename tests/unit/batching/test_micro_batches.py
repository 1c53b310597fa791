"""Planning loses nothing, repeats nothing, stays within the limits, and is even."""

import math
import random
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.batching.micro_batches import (
    Form,
    MicroBatchLayout,
    StepSizes,
    TokenCost,
    assign_rows,
    canonical_units,
    cut_by_count,
    cut_by_tokens,
    plan_step,
)
from grpo_ext.batching.sizes import group_numbers

FORMS = get_args(Form)
COST = TokenCost(attention=3e-4, head=0.2)


def whole(num_generations: int, prompts_G: list[int], completions_B: list[int]) -> StepSizes:
    """A step of whole groups."""
    groups = group_numbers(len(completions_B), num_generations)
    return StepSizes(groups, [prompts_G[group] for group in groups], completions_B)


@pytest.mark.parametrize("seed", range(5))
def test_packs_are_few_and_even(seed):
    rng = random.Random(seed)
    prompts = [rng.randint(1, 200) for _ in range(40)]
    sizes = whole(8, prompts, [min(800, int(rng.expovariate(1 / 120))) for _ in range(320)])
    parts = cut_by_tokens(sizes, range(320), MicroBatchLayout(1000, 4000, "packed"))
    tokens = [sizes.tokens(part, "packed") for part in parts]
    assert len(parts) <= 1.15 * sum(tokens) / 4000 + 1
    assert max(tokens) <= 1.25 * sum(tokens) / len(tokens)


def test_one_group_is_cut_for_two_processes_when_that_pays():
    sizes, on_two = whole(4, [10], [200, 200, 200, 200]), MicroBatchLayout(1, cost=COST, processes=2)
    assert sorted(map(len, assign_rows(sizes, range(4), on_two))) == [2, 2]
    long_prompt = whole(4, [2000], [1, 1, 1, 1])
    assert sorted(map(len, assign_rows(long_prompt, range(4), on_two))) == [0, 4]


def cut_step(seed: int, num_generations: int, first: int, rows: int, multiple: int = 1) -> StepSizes:
    """Rows `first` to `first + rows` of a rollout batch: groups may be cut at both ends."""
    rng = random.Random(seed)
    groups = [row // num_generations for row in range(first, first + rows)]
    prompts = {group: rng.randint(1, 200) for group in groups}
    return StepSizes(groups, [prompts[g] for g in groups], [rng.randint(0, 300) for _ in groups], multiple)


CUT_STEPS = st.builds(
    cut_step, st.integers(0, 999), st.integers(2, 6), st.integers(0, 40), st.integers(1, 30), st.sampled_from([1, 64])
)


@given(CUT_STEPS, st.data())
def test_pieces_and_units_never_mix_groups_and_keep_every_row_in_order(sizes, data):
    rows = data.draw(st.lists(st.sampled_from(range(len(sizes.groups_B))), unique=True)) or [0]
    size = data.draw(st.integers(1, 6))
    for parts in (sizes.pieces(rows), canonical_units(sizes, sorted(rows), size)):
        assert [row for part in parts for row in part] == sorted(rows)
        assert all(len({sizes.groups_B[row] for row in part}) == 1 for part in parts)
    assert all(len(unit) <= size for unit in canonical_units(sizes, sorted(rows), size))
    assert len(sizes.pieces(rows)) == len({sizes.groups_B[row] for row in rows})


@given(
    CUT_STEPS,
    st.integers(1, 12),
    st.integers(1, 2000),
    st.sampled_from(FORMS),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 6),
)
def test_a_cut_step_is_planned_without_loss_within_the_limits(
    sizes, max_rows, max_tokens, form, whole_groups, processes, unit
):
    rows = list(range(len(sizes.groups_B)))
    by_count = cut_by_count(sizes, rows, max_rows)
    assert [row for part in by_count for row in part] == rows
    assert max(map(len, by_count)) <= max_rows
    assert len(by_count) == math.ceil(len(rows) / max_rows)
    by_tokens = cut_by_tokens(sizes, rows, MicroBatchLayout(max_rows, max_tokens, form, whole_groups=whole_groups))
    assert sorted(row for part in by_tokens for row in part) == rows
    for part in by_tokens:
        assert len(part) <= max_rows
        assert sizes.tokens(part, form) <= max_tokens or len(part) == 1
    layout = MicroBatchLayout(1, cost=COST, whole_groups=whole_groups, processes=processes)
    shares = assign_rows(sizes, rows, layout)
    assert sorted(row for share in shares for row in share) == rows
    assert all(share == sorted(share) for share in shares)
    units = replace(layout, unit_rows=unit)
    for layout in (units, MicroBatchLayout(max_rows, max_tokens, form, cost=COST, processes=processes)):
        planned = [plan_step(sizes, rows, replace(layout, rank=rank)) for rank in range(processes)]
        assert all(planned)
        run = [[part for part in own if part.weight] for own in planned]
        assert sorted(row for own in run for part in own for row in part.rows) == rows
        if layout is units:
            assert sorted(list(part.rows) for own in run for part in own) == canonical_units(sizes, rows, unit)
            continue
        for own in run:  # the others reuse the memory of the largest, which comes first
            tokens = [sizes.tokens(part.rows, form) for part in own]
            assert tokens == sorted(tokens, reverse=True)


@given(
    CUT_STEPS,
    st.sampled_from(["equal_lengths", "single"]),
    st.integers(1, 12),
    st.none() | st.integers(1, 2000),
    st.none() | st.integers(1, 6),
    st.integers(1, 6),
    st.booleans(),
)
def test_rows_that_padding_changes_share_a_batch_with_their_equals_alone(
    sizes, batching, max_rows, max_tokens, unit, processes, equal_counts
):
    rows = list(range(len(sizes.groups_B)))
    limits = MicroBatchLayout(max_rows, max_tokens, unit_rows=unit, processes=processes, equal_counts=equal_counts)
    layout = replace(limits, batching=batching)
    planned = [plan_step(sizes, rows, replace(layout, rank=rank)) for rank in range(processes)]
    parts = [part.rows for own in planned for part in own if part.weight]
    assert sorted(row for part in parts for row in part) == rows
    for part in parts:
        assert len({sizes.lengths(row) for row in part}) == 1
        assert len(part) <= (max_rows if batching == "equal_lengths" and unit is None else 1)
        assert max_tokens is None or len(part) == 1 or sizes.tokens(part, "padded") <= max_tokens
    if equal_counts:
        assert len(set(map(len, planned))) == 1
    if unit is not None:  # a function of the data alone
        assert sorted(parts) == [(row,) for row in rows]
    assert sizes.joinable(rows, "any") == [rows]


def test_rows_of_equal_lengths_run_together():
    sizes = whole(4, [9, 9, 5], [3, 3, 8, 3, 8, 8, 3, 3, 3, 3, 8, 8])
    plan = plan_step(sizes, range(12), MicroBatchLayout(4, batching="equal_lengths"))
    assert sorted(part.rows for part in plan) == [(0, 1, 3), (2, 4, 5), (6, 7), (8, 9), (10, 11)]
    assert [len(part.rows) for part in plan_step(sizes, range(12), MicroBatchLayout(4))] == [4, 4, 4]


def test_a_prompt_counts_once_for_the_rows_of_its_group_that_the_step_has():
    sizes = cut_step(0, 4, first=2, rows=5)  # two rows of one group, three of the next
    assert [len(piece) for piece in sizes.pieces(range(5))] == [2, 3]
    assert sizes.tokens(range(5), "packed") == sizes.prompts_B[0] + sizes.prompts_B[2] + sum(sizes.completions_B)
    # the negative control: groups counted from the step's first row hold two prompts each
    counted = replace(sizes, groups_B=group_numbers(5, 4))
    assert len({sizes.prompts_B[row] for row in counted.pieces(range(5))[0]}) == 2


def test_sharded_processes_run_the_same_number_of_forwards():
    sizes = whole(4, [30, 5, 12, 7], [9, 40, 3, 1, 8, 8, 8, 8, 2, 0, 60, 5, 7, 7, 30, 1])
    layout = MicroBatchLayout(16, 90, form="packed", cost=TokenCost(1e-3, 0.2), processes=3, equal_counts=True)
    counts = [len(plan_step(sizes, range(16), replace(layout, rank=rank))) for rank in range(3)]
    alone = [len(plan_step(sizes, range(16), replace(layout, rank=rank, equal_counts=False))) for rank in range(3)]
    assert counts == [max(alone)] * 3
