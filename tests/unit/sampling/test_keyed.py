"""Rollouts: keyed sampling is the model's own sampling, row by row."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import GenerationConfig

from grpo_ext.algorithms.keyed_random import TRAIN_STREAM, completion_keys
from grpo_ext.batching.prompt_order import ProcessSlices, request_keys
from grpo_ext.batching.sizes import BatchGeometry, ChunkSizes, EpochLayout
from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.runtime.out_of_memory import Halving
from grpo_ext.sampling.engine import EngineSettings, TransformersEngine, cut_calls, sample_chunk
from tests.support.rollouts import sampled_chunk
from tests.support.selection import few_of
from tests.support.tiny import tiny_model
from tests.tolerances import P_VALUE

VOCABULARY, PAD, EOS = 24, 0, 1
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model(vocab_size=VOCABULARY, initializer_range=0.4, **sizes).eval()


def sampling(**options) -> GenerationConfig:
    plain = {"do_sample": True, "pad_token_id": PAD, "eos_token_id": EOS, "max_new_tokens": 10, "top_k": 0}
    return GenerationConfig(**{**plain, **options})


def keys(rows: int, seed: int = 0) -> torch.Tensor:
    index = torch.arange(rows)
    return completion_keys(seed, TRAIN_STREAM, 0, 0, index // 8, index % 8)


def sample(model, prompts, keys_B, config=None, **options) -> list[list[int]]:
    return sampled_chunk(model, prompts, keys_B, config or sampling(), [EOS], **options)


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [5, 6, 7], [3, 4], [15, 16, 17, 18], [2, 2, 2], [19]]


# ---- Filters --------------------------------------------------------------------------------------------------------

FILTERS = {
    "none": {},
    "trl's": {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.02},
    "all": {
        **{"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
        **{"typical_p": 0.95, "epsilon_cutoff": 0.003, "eta_cutoff": 0.003},
    },
    "top_h": {"top_h": 0.3},
}


def transformers_filters(model, config: GenerationConfig):
    model._prepare_special_tokens(config, device=CPU)
    return model._get_logits_processor(config, input_ids_seq_length=1, device=CPU, model_kwargs={})


# ---- A row alone, in a batch, in any order --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "trl's"])
def test_a_completion_is_the_same_alone_in_a_batch_and_in_any_order(model, name):
    config = sampling(**FILTERS[name])
    before, keys_B = config.to_dict(), keys(len(PROMPTS))
    together = sample(model, PROMPTS, keys_B, config)
    assert len({tuple(c) for c in together}) > len(PROMPTS) / 2
    alone = [sample(model, [p], keys_B[i : i + 1], config)[0] for i, p in enumerate(PROMPTS)]
    assert alone == together
    order = [3, 7, 0, 5, 1, 6, 2, 4]
    shuffled = sample(model, [PROMPTS[i] for i in order], keys_B[order], config)
    assert shuffled == [together[i] for i in order]
    assert sample(model, PROMPTS, keys_B, config, multiple=16) == together
    assert config.to_dict() == before


# ---- The distribution is the model's --------------------------------------------------------------------------------

DRAWS, CHUNK = 20_000, 4_000


def first_tokens(model, config: GenerationConfig) -> np.ndarray:
    """How often each token is the first of a completion of one prompt, over `DRAWS` keys."""
    config = GenerationConfig.from_dict({**config.to_dict(), "max_new_tokens": 1})
    prompt, counts = [5, 6, 7], np.zeros(VOCABULARY, dtype=int)
    for start in range(0, DRAWS, CHUNK):
        tokens = sample(model, [prompt] * CHUNK, keys(DRAWS)[start : start + CHUNK], config)
        counts += np.bincount([c[0] for c in tokens], minlength=VOCABULARY)
    return counts


def expected_distribution(model, **options) -> np.ndarray:
    """The softmax of the model's logits, filtered as transformers does."""
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    return transformers_filters(model, sampling(**options))(ids, logits)[0].double().softmax(-1).numpy()


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    possible = probabilities > 0
    assert counts[~possible].sum() == 0, f"impossible tokens were sampled: {np.flatnonzero(counts * ~possible)}"
    expected = probabilities * DRAWS
    rare = possible & (expected < 5)
    observed = [*counts[possible & ~rare]] + ([counts[rare].sum()] if rare.any() else [])
    wanted = [*expected[possible & ~rare]] + ([expected[rare].sum()] if rare.any() else [])
    return stats.chisquare(observed, np.array(wanted) * DRAWS / sum(wanted)).pvalue


DISTRIBUTIONS = {
    "all": {"temperature": 1.4, "top_k": 15, "top_p": 0.9, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 3.0, "temperature": 0.8},
}


@pytest.mark.parametrize("name", few_of(DISTRIBUTIONS, ("all",)))
def test_the_first_token_follows_the_filtered_softmax_of_the_models_logits(model, name):
    options = DISTRIBUTIONS[name]
    counts = first_tokens(model, sampling(**options))
    assert p_value(counts, expected_distribution(model, **options)) > P_VALUE
    other = {**options, "temperature": options["temperature"] * 1.1}  # the control
    assert p_value(counts, expected_distribution(model, **other)) < P_VALUE


# ---- Keys and rows --------------------------------------------------------------------------------------------------


def geometry(generations=2, prompts=6, chunk_groups=2) -> BatchGeometry:
    size = generations * prompts
    return BatchGeometry(generations, size, size, 1, 4, 1, chunk_groups * generations)


@pytest.mark.parametrize("processes", [2, 3])
def test_the_keys_of_all_processes_are_the_keys_of_one(processes):
    g = geometry()
    layout = EpochLayout(g, 12)[1]
    requests = [ProcessSlices(2, g.rollout_chunk_size, processes, rank).request(3, layout) for rank in range(processes)]
    rows = [len(request.prompts) * 2 for request in requests]
    parts = [request_keys(one, n, seed=5, training=True) for one, n in zip(requests, rows) if not one.stands_in]
    index = torch.arange(12)
    assert [key for part in parts for key in part] == completion_keys(
        5, TRAIN_STREAM, 3, 1, index // 2, index % 2
    ).tolist()


def test_keys_of_other_streams_epochs_rollouts_rounds_and_seeds_differ():
    g, found = geometry(), set()
    for epoch, rollout, first, training, seed in itertools.product((0, 1), (0, 1), (0, 6), (True, False), (0, 1)):
        slices = ProcessSlices(2, g.rollout_chunk_size, 1, 0)
        request = slices.request(epoch, EpochLayout(g, 12)[rollout], 6, first_prompt=first)  # of dynamic sampling
        found |= set(request_keys(request, 12, seed, training))
    assert len(found) == 32 * 12


def transcripts(places) -> list[Transcript]:
    return [Transcript(key=7 * place, place=place, prompt_ids=[5]) for place in places]


@given(st.lists(st.integers(0, 40), unique=True, max_size=20).map(sorted), st.integers(1, 9))
def test_rows_of_a_later_turn_keep_the_chunks_of_the_first(places, size):
    parts = [[places[i] for i in part] for part in cut_calls(transcripts(places), ChunkSizes(1, size, size))]
    assert [place for part in parts for place in part] == places
    assert all(part for part in parts)
    assert [{place // size for place in part} for part in parts] == [{c} for c in sorted({p // size for p in places})]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=20), st.integers(1, 9))
def test_rows_of_different_lengths_are_sampled_by_different_calls(lengths, size):
    # in later turns too, where completions have grown
    rows = [Transcript(0, n, prompt_ids=[5] * p, ids=[6] * c) for n, (p, c) in enumerate(lengths)]
    calls = cut_calls(rows, ChunkSizes(1, size, size, "equal_lengths"))
    assert sorted(index for call in calls for index in call) == list(range(len(rows)))
    names = [{(index // size, sum(lengths[index])) for index in call} for call in calls]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(set(), *names)) == len(calls)  # no call more than needed
    # chunks on another process are cut the same way
    later = cut_calls(rows[size:], ChunkSizes(1, size, size, "equal_lengths"))
    assert [[index + size for index in call] for call in later] == [call for call in calls if min(call) >= size]
    assert [len(call) for call in cut_calls(rows, ChunkSizes(1, size, size, "single"))] == [1] * len(rows)


def engine_of(model) -> TransformersEngine:
    PartialState()  # the logger asks it which process this is
    settings = EngineSettings(CPU, None, filler=EOS, pad=EOS)
    memory = Halving("generation", "", True)
    return TransformersEngine(lambda: model, lambda: nullcontext(model), settings, lambda rows: None, memory)


def test_a_later_turn_goes_on_where_the_completion_is(model):
    # the tokens of tools are counted: each token of a completion has the random number of its position
    config, prompts, engine = sampling(suppress_tokens=[EOS], max_new_tokens=4), PROMPTS[:4] * 4, engine_of(model)
    sizes = ChunkSizes(group=4, chunk=8, call=8)
    rows = [
        Transcript(int(key), place, prompt_ids=list(ids)) for place, (key, ids) in enumerate(zip(keys(16), prompts))
    ]
    with torch.no_grad():
        for row, turn in zip(rows, engine.generate(rows, config, sizes)):
            row.add_turn(turn)
        first = [row.ids for row in rows]
        assert first == sample(model, prompts, keys(16), config)
        active = [row for row in rows if row.place % 3]
        for row in active:
            row.add_answer([3] * (1 + row.place % 2))
        found = [turn.ids for turn in engine.generate(active, config, sizes)]
    assert {len(row.ids) for row in active} == {5, 6}
    assert found == alone(model, active, config)
    for row in active:  # the same tokens one position earlier
        row.prompt_ids, row.ids = [*row.prompt_ids, row.ids[0]], row.ids[1:]
    assert found != alone(model, active, config)
    assert [row.ids for row in rows if row.place % 3 == 0] == first[::3]


def alone(model, rows: list[Transcript], config: GenerationConfig) -> list[list[int]]:
    """New tokens of each row by a call of its own."""
    with torch.no_grad():
        return [sample_chunk(model, [row], config, engine_of(model).settings)[0].ids for row in rows]
