"""Planning loses nothing, repeats nothing, stays within the limits, and is even."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from grpo_ext.core.micro_batches import (
    StepSizes,
    TokenCost,
    cut_by_count,
    cut_by_tokens,
    cut_in_order,
    deal_rows,
    oversized,
)

COST = TokenCost.of_model(attention_width=8 * 512, body=24_000_000, head=4_000_000)


def step(seed: int, groups: int = 6, num_generations: int = 8, skewed: bool = False) -> StepSizes:
    rng = random.Random(seed)
    prompts = [rng.randint(1, 200) for _ in range(groups)]
    length = (lambda: min(800, int(rng.expovariate(1 / 120)))) if skewed else (lambda: rng.randint(0, 300))
    return StepSizes(num_generations, prompts, [length() for _ in range(groups * num_generations)])


def load(sizes: StepSizes, rows: list[int]) -> float:
    prompts = {sizes.group(row) for row in rows}
    return sum(COST.prompt(sizes.prompts_G[g]) for g in prompts) + sum(
        COST.completion(sizes.completions_B[r], sizes.prompts_G[sizes.group(r)]) for r in rows
    )


def imbalance(sizes: StepSizes, shares: list[list[int]]) -> float:
    loads = [load(sizes, share) for share in shares]
    return max(loads) / (sum(loads) / len(loads))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("max_rows", [3, 8, 1000])
@pytest.mark.parametrize("max_tokens", [300, 1200, 10**6])
@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("seed", range(4))
def test_a_token_budget_holds_and_nothing_is_lost_or_twice(seed, multiple, max_tokens, max_rows, packed):
    sizes = replace(step(seed, skewed=seed % 2 == 1), multiple=multiple)
    rows = [r for r in range(48) if r % 5]
    parts = cut_by_tokens(sizes, rows, max_rows, max_tokens, packed)
    assert sorted(row for part in parts for row in part) == rows
    for part in parts:
        assert len(part) <= max_rows
        alone = len(part) == 1 and part[0] in oversized(sizes, max_tokens, packed)
        assert sizes.tokens(part, packed) <= max_tokens or alone


@pytest.mark.parametrize("seed", range(20))
def test_packs_are_few_and_even(seed):
    sizes = step(seed, groups=40, skewed=True)
    parts = cut_by_tokens(sizes, range(320), 1000, 4000, packed=True)
    tokens = [sizes.tokens(part, packed=True) for part in parts]
    assert len(parts) <= 1.15 * sum(tokens) / 4000 + 1
    assert max(tokens) <= 1.25 * sum(tokens) / len(tokens)


def test_a_group_larger_than_the_budget_is_cut_and_repeats_its_prompt():
    sizes = StepSizes(4, [100], [50, 50, 50, 50])
    parts = cut_by_tokens(sizes, range(4), 8, 200, packed=True)
    assert [sizes.tokens(part, packed=True) for part in parts] == [200, 200]


def test_a_row_larger_than_the_budget_goes_alone():
    sizes = StepSizes(2, [10, 10], [500, 20, 20, 20])
    assert oversized(sizes, 100) == [0]
    for packed in (True, False):
        parts = cut_by_tokens(sizes, range(4), 8, 100, packed)
        assert [0] in parts
        assert sorted(r for part in parts for r in part) == [0, 1, 2, 3]


@pytest.mark.parametrize(("rows", "max_rows"), [(32, 5), (32, 8), (16, 16), (7, 3), (1, 4), (32, 12)])
def test_cuts_by_count_are_the_fewest_and_even(rows, max_rows):
    sizes = StepSizes(8, [10] * 4, [10] * 32)
    parts = cut_by_count(sizes, range(rows), max_rows)
    assert [r for part in parts for r in part] == list(range(rows))
    assert len(parts) == -(-rows // max_rows)
    assert max(map(len, parts)) <= max_rows


def test_cuts_by_count_fall_between_groups_where_they_can():
    sizes = StepSizes(8, [10] * 4, [10] * 32)
    assert [len(part) for part in cut_by_count(sizes, range(32), 12)] == [8, 12, 12]
    assert [len(part) for part in cut_by_count(sizes, range(32), 20)] == [16, 16]


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7, 60])
@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_dealt_once(seed, processes):
    sizes = step(seed)
    rows = [r for r in range(48) if r % 7]
    shares = deal_rows(sizes, rows, processes, COST)
    assert len(shares) == processes
    assert sorted(row for share in shares for row in share) == rows


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_loads_are_even_where_counts_are_not(seed, processes):
    sizes = step(seed, skewed=True)
    rows = list(range(48))
    by_count = [rows[48 * p // processes : 48 * (p + 1) // processes] for p in range(processes)]
    by_cost = deal_rows(sizes, rows, processes, COST)
    assert imbalance(sizes, by_cost) <= 1.1
    assert imbalance(sizes, by_cost) <= imbalance(sizes, by_count)


def test_groups_stay_whole_where_that_is_even():
    sizes = StepSizes(4, [50] * 8, [30] * 32)
    for share in deal_rows(sizes, range(32), 4, COST):
        assert [len(piece) for piece in sizes.pieces(share)] == [4, 4]


def test_one_group_is_cut_for_two_processes_when_that_pays():
    sizes = StepSizes(4, [10], [200, 200, 200, 200])
    assert sorted(map(len, deal_rows(sizes, range(4), 2, COST))) == [2, 2]
    long_prompt = StepSizes(4, [2000], [1, 1, 1, 1])
    assert sorted(map(len, deal_rows(long_prompt, range(4), 2, COST))) == [0, 4]


def test_a_prompt_costs_once_and_attention_grows_faster_than_length():
    assert COST.completion(200, 100) > 2 * COST.completion(100, 100)
    assert COST.prompt(0) == 0.0
    assert TokenCost().completion(7, 1000) == 7


def test_passes_without_gradients_are_cut_in_order():
    prompts, completions, same = [10, 10, 10, 4], [5, 5, 5, 5], [True, True, False]
    assert cut_in_order(prompts, completions, same, 2, None, True) == [slice(0, 2), slice(2, 4)]
    assert cut_in_order(prompts, completions, same, 9, 25, True) == [slice(0, 3), slice(3, 4)]
    assert cut_in_order(prompts, completions, same, 9, 30, False) == [slice(0, 2), slice(2, 4)]
    assert cut_in_order(prompts, completions, same, 9, 3, True) == [slice(i, i + 1) for i in range(4)]
