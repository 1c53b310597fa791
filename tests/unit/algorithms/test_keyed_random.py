"""Keyed random numbers: the mixer is SplitMix64's, keys differ, numbers are uniform, choices are categorical."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from grpo_ext.algorithms.keyed_random import (
    EVAL_STREAM,
    TRAIN_STREAM,
    choose,
    choose_by_blocks,
    completion_keys,
    derive_key,
    mix,
    row_keys,
    uniform,
)
from tests.tolerances import P_VALUE


def test_the_mixer_is_splitmix64():
    # the generator's published outputs for seed 1234567 (Rosetta Code, "Pseudo-random numbers/Splitmix64")
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    golden = 0x9E3779B97F4A7C15
    assert [derive_key((1234567 + n * golden) % 2**64) for n in range(4)] == published


def test_keys_of_different_completions_do_not_collide():
    prompts = torch.arange(256).repeat_interleave(16)
    generations = torch.arange(16).repeat(256)
    places = itertools.product((0, 1, 42), (TRAIN_STREAM, EVAL_STREAM), range(3), range(4))  # rollouts last
    keys = torch.cat([completion_keys(*place, prompts, generations) for place in places])
    assert keys.dtype == torch.int64
    assert len(keys) == 72 * 4096
    # 64 bits: a collision among these would have a chance of 2e-9
    assert len(keys.unique()) == len(keys)


def test_every_row_of_a_completion_has_numbers_of_its_own_and_the_first_those_of_the_completion():
    index = torch.arange(64)
    keys = completion_keys(42, TRAIN_STREAM, 0, 0, index // 8, index % 8)
    assert torch.equal(row_keys(keys, 0), keys)
    numbers = [uniform(row_keys(keys, row), position) for row in range(6) for position in range(32)]
    # also those of a position in the first row are none of the beginning of a row
    numbers += [uniform(mix(keys, position), 0) for position in range(32)]
    assert len(torch.cat(numbers).unique()) == (6 + 1) * 32 * 64


NUMBERS = 100_000


def test_numbers_are_uniform_and_neighbours_not_correlated():
    index = torch.arange(NUMBERS)  # 8 generations of each prompt, one position
    u = uniform(completion_keys(42, TRAIN_STREAM, 0, 0, index // 8, index % 8), 0).numpy()
    assert u.dtype == np.float64
    assert u.min() >= 0.0
    assert u.max() < 1.0
    scaled = u * 2.0**53
    assert np.array_equal(scaled, np.floor(scaled))
    assert set(scaled.astype(np.int64) % 2) == {0, 1}  # the last of 53 bits is used
    assert stats.kstest(u, "uniform").pvalue > P_VALUE
    centred = u - 0.5
    for lag in (1, 2, 3, 7, 8, 64):
        correlation = (centred[:-lag] * centred[lag:]).mean() * 12
        # standard normal when independent
        z = correlation * math.sqrt(len(centred) - lag)
        assert 2 * stats.norm.sf(abs(z)) > P_VALUE / 6, f"lag {lag}: correlation {correlation:.2e}"


@given(
    st.lists(st.one_of(st.floats(-30, 30), st.just(-math.inf)), min_size=1, max_size=40).filter(
        lambda s: max(s) > -math.inf
    ),
    st.floats(0, 1, exclude_max=True),
)
def test_a_choice_is_the_inverse_of_the_distribution_function(scores, u):
    row = torch.tensor(scores, dtype=torch.float64)
    probabilities = torch.softmax(row, 0).numpy()
    token = int(choose(row[None], torch.tensor([u], dtype=torch.float64))[0])
    assert probabilities[token] > 0
    cumulative = np.cumsum(probabilities.astype(np.longdouble))
    exact = int(np.searchsorted(cumulative, np.longdouble(u) * cumulative[-1], side="right"))
    # within rounding of a boundary either neighbour is right
    assert token == exact or np.abs(np.cumsum(probabilities) - u).min() < 1e-15 * len(scores)


RULES = [choose, choose_by_blocks]  # on the CPU, on CUDA


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_a_filtered_token_is_never_chosen_even_at_the_edges(u, dtype, rule):
    generator = torch.Generator().manual_seed(0)
    scores = 9 * torch.randn(300, 500, generator=generator).to(dtype)
    scores[torch.rand(300, 500, generator=generator) < 0.8] = -torch.inf
    scores[:, [0, 1, 498, 499]] = -torch.inf  # where u = 0 and u -> 1 would land
    scores[:, 200] = 0.0
    scores[::2, 202:] = -40.0  # of a block that has next to nothing
    scores[::2, 256:] = -torch.inf
    tokens, _ = rule(scores, torch.full((300,), u, dtype=torch.float64))
    assert torch.isfinite(scores.gather(1, tokens[:, None])).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_no_token_is_chosen_from_scores_that_are_not_finite(value, rule):
    scores = torch.zeros(2, 300)
    scores[1, :] = value
    assert rule(scores, torch.tensor([0.501, 0.5], dtype=torch.float64))[0].tolist() == [150, 300]


# ---- By blocks, for CUDA --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [60, 128, 997, 1280])
def test_blocks_choose_what_the_distribution_function_chooses(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    scores = 3 * torch.randn(4000, vocabulary, generator=generator)
    scores[:, ::7] = -torch.inf
    u = torch.rand(4000, generator=generator, dtype=torch.float64)
    # float32 moves a boundary by 1e-7 at most
    assert (choose_by_blocks(scores, u)[0] != choose(scores, u)[0]).sum() <= 1
    assert (choose_by_blocks(scores, 1 - u)[0] != choose(scores, u)[0]).sum() > 1000


def test_rare_tokens_of_a_block_are_as_frequent_as_they_are_probable():
    probabilities = torch.full((4,), 2.0**-40)
    probabilities[0] = 1 - 3 * 2.0**-40
    scores = torch.full((1, 400), -torch.inf)
    scores[0, [0, 130, 131, 390]] = probabilities.log()
    u = 1 - torch.tensor([3.5, 2.5, 1.5, 0.5], dtype=torch.float64) * 2.0**-40
    assert choose_by_blocks(scores.expand(4, -1), u)[0].tolist() == [0, 130, 131, 390]
