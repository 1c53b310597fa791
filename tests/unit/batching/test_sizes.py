"""Geometry: sizes resolve as TRL means them, refusals name a remedy that works, layouts lose nothing."""

import math
import re

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.batching.sizes import (
    CHUNK,
    CHUNKS,
    BatchGeometry,
    EpochLayout,
    ceil_div,
    geometry_of,
    process_prompts,
)
from grpo_ext.checks.settings import check_equal_shares
from grpo_ext.config import GRPOConfig
from grpo_ext.errors import ConfigError


def resolve(num_processes: int = 1, **settings) -> BatchGeometry:
    return geometry_of({"num_generations": 4, "per_device_train_batch_size": 4, **settings}, num_processes)


def refusal(**sizes) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(**sizes)
    return str(caught.value)


# ---- Refusals name a remedy that works; tests/trainer/test_bad_input.py reads the rest of the messages --------------


@pytest.mark.parametrize("value", [0, 1.5, True])
def test_sizes_must_be_positive_integers(value):
    with pytest.raises(ConfigError, match=rf"^per_device_train_batch_size={value!r} .*whole number, 1 or more"):
        resolve(per_device_train_batch_size=value)


SIX = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize(
    ("settings", "wrong", "name", "sizes"),
    [
        ({}, {"global_batch_size": 15}, "global_batch_size", [12, 16]),
        (SIX, {"rollout_batch_size": 54}, "rollout_batch_size", [36, 72]),
        (SIX, {"steps_per_generation": 9}, "rollout_batch_size", [36, 72]),
        ({"global_batch_size": 18}, {"rollout_batch_size": 40}, "rollout_batch_size", [36, 72]),
        ({"global_batch_size": 16}, {"rollout_batch_size": 8}, "rollout_batch_size", [16]),
        ({}, {"rollout_chunk_size": 7}, "rollout_chunk_size", [4, 8]),
    ],
    ids=str,
)
def test_sizes_that_cut_groups_are_refused_with_sizes_that_work(settings, wrong, name, sizes):
    message = refusal(**settings, **wrong)
    assert f"={next(iter(wrong.values()))}" in message
    remedy = re.search(r"(?:use|global_batch_size to) (\d+)(?: or (\d+))?", message)
    assert remedy is not None, f"no remedy in {message!r}"
    assert [int(size) for size in remedy.groups() if size is not None] == sizes
    for size in sizes:
        assert getattr(resolve(**settings, **{name: size}), name) == size
    if beside := re.search(r"rollout_batch_size to (\d+)", message):  # or the step stays, and rollouts are larger
        assert resolve(**settings, **wrong, rollout_batch_size=int(beside.group(1))).rollout_batch_size % 4 == 0


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ({"rollout_batch_size": 16, "generation_batch_size": 32}, "set only rollout_batch_size"),
        ({"rollout_batch_size": 8, "steps_per_generation": 2}, "set only rollout_batch_size"),
        # it would depend on the hardware
        ({"global_batch_size": 18, "steps_per_generation": 2}, "set rollout_batch_size (a multiple of 36)"),
    ],
)
def test_two_sizes_that_contradict_each_other_are_refused(sizes, remedy):
    message = refusal(**sizes)
    assert remedy in message
    assert all(f"{name}={value}" in message for name, value in sizes.items())


@given(st.integers(2, 9), st.integers(1, 40), st.integers(1, 17), st.integers(1, 9), st.integers(1, 4))
def test_the_derived_accumulation_is_rounded_up_never_floored(generations, prompts, micro, processes, steps):
    total = generations * prompts
    sizes = {"global_batch_size": total, "rollout_batch_size": total * steps, "per_device_train_batch_size": micro}
    g = resolve(processes, num_generations=generations, **sizes)
    busiest = -(-total // processes)
    assert g.accumulation_steps == -(-busiest // micro)
    assert g.global_batch_size == total  # whatever the layout
    assert (g.prompts_per_rollout, g.steps_per_rollout) == (prompts * steps, steps)


def test_an_accumulation_that_is_given_has_to_be_the_derived_one():
    sizes = {"global_batch_size": 20, "num_processes": 3}
    # shares of 7, 7 and 6 in micro-batches of 4
    assert resolve(**sizes, gradient_accumulation_steps=2).global_batch_size == 20
    assert "derived as 2" in refusal(**sizes, gradient_accumulation_steps=3)


# ---- TRL's meaning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro", "accumulation", "generations", "phase"),
    [
        *((4, 4, 2, phase) for phase in ({}, {"steps_per_generation": 8}, {"generation_batch_size": 64})),
        # steps that cut groups
        *((6, 3, 4, phase) for phase in ({"steps_per_generation": 6}, {"generation_batch_size": 36})),
    ],
)
def test_trls_fields_give_trls_sizes(micro, accumulation, generations, phase):
    sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation, **phase}
    config = {"use_cpu": True, "report_to": "none", "num_generations": generations, **sizes}
    theirs = trl.GRPOConfig(**config)
    for g in (GRPOConfig(**config).geometry, GRPOConfig.from_trl(theirs).geometry):
        assert g.global_batch_size == micro * accumulation
        assert g.rollout_batch_size == theirs.generation_batch_size == g.prompts_per_rollout * generations
        assert g.accumulation_steps == theirs.gradient_accumulation_steps
        assert g.steps_per_rollout * accumulation == theirs.steps_per_generation


@given(st.integers(2, 100), st.integers(1, 200), st.integers(1, 8))
def test_the_default_chunks_are_whole_groups_that_up_to_eight_processes_share(generations, groups, processes):
    sizes = {"num_generations": generations, "global_batch_size": generations * groups}
    g = resolve(**sizes, num_processes=processes)
    assert g.rollout_chunk_size == resolve(**sizes, per_device_train_batch_size=7).rollout_chunk_size
    assert g.rollout_chunk_size % generations == 0
    assert g.rollout_chunk_size == generations or g.rollout_chunk_size <= CHUNK
    assert ceil_div(groups * generations, g.rollout_chunk_size) >= min(groups, CHUNKS)
    shares = [process_prompts(groups, generations, g.rollout_chunk_size, processes, rank) for rank in range(processes)]
    assert all(shares) or groups < processes
    assert g.sampled_share == generations * max(map(len, shares)) == g.generate_size
    assert g.generate_calls == 1
    assert g.idle_share == pytest.approx(1 - groups / (processes * max(map(len, shares))))


@given(st.integers(2, 100), st.integers(1, 200))
def test_bitwise_mode_and_a_chunk_size_of_the_users_have_a_call_for_each_chunk(generations, groups):
    sizes = {"num_generations": generations, "global_batch_size": generations * groups}
    bitwise = resolve(**sizes, bitwise_invariant=True)
    assert bitwise.rollout_chunk_size == max(1, 64 // generations) * generations
    for g in (bitwise, resolve(**sizes, rollout_chunk_size=2 * generations)):
        assert not g.together
        assert g.generate_size == min(g.rollout_chunk_size, g.rollout_batch_size)
        assert g.generate_calls == ceil_div(g.rollout_batch_size, g.rollout_chunk_size)


@given(st.integers(0, 60), st.integers(2, 8), st.integers(1, 6), st.integers(1, 12))
def test_rollout_shares_are_whole_chunks_cut_at_the_same_places_for_every_process_count(
    prompts, generations, groups, processes
):
    chunk = groups * generations
    boundaries = list(range(0, prompts, groups))
    for count in (1, processes, prompts + 5):  # the last: more processes than chunks
        shares = [process_prompts(prompts, generations, chunk, count, rank) for rank in range(count)]
        assert [p for share in shares for p in share] == list(range(prompts))
        cut = [start for share in shares for start in range(share.start, share.stop, groups)]
        assert cut == boundaries, f"{count} processes cut chunks at {cut}"
        for share in shares:
            assert share.start % groups == 0 or len(share) == 0
            assert share.stop % groups == 0 or share.stop == prompts
        chunks = [ceil_div(len(share), groups) for share in shares]
        assert max(chunks) - min(chunks) <= 1


# ---- Epochs ---------------------------------------------------------------------------------------------------------


def cutting(generations: int, rows: int, multiples: int, iterations: int) -> BatchGeometry:
    """Steps of any number of completions, rollouts of whole groups."""
    sizes = {"global_batch_size": rows, "rollout_batch_size": math.lcm(generations, rows) * multiples}
    return resolve(num_generations=generations, num_iterations=iterations, **sizes)


LAYOUTS = st.builds(
    EpochLayout,
    st.builds(cutting, st.integers(2, 4), st.integers(1, 18), st.integers(1, 3), st.integers(1, 3)),
    st.integers(0, 50),
    st.booleans(),
)


def steps_of(layout: EpochLayout):
    return [layout[i] for i in range(len(layout))]


@given(LAYOUTS)
def test_the_steps_of_a_rollout_tile_it_and_only_the_first_samples(layout):
    rollouts: dict[int, list] = {}
    for step in steps_of(layout):
        rollouts.setdefault(step.rollout, []).append(step)
    assert sorted(rollouts) == list(range(len(rollouts)))
    prompts = ceil_div(layout.trained_completions, layout.geometry.num_generations)
    assert [p for steps in rollouts.values() for p in steps[0].rollout_prompts] == list(range(prompts))
    trained = 0
    for steps in rollouts.values():
        assert len({step.rollout_prompts for step in steps}) == 1
        assert [step.starts_rollout for step in steps] == [True] + [False] * (len(steps) - 1)
        assert [(s.iteration, s.step) for s in steps] == sorted((s.iteration, s.step) for s in steps)
        for iteration in range(layout.geometry.num_iterations):
            tiled = [row for s in steps if s.iteration == iteration for row in s.step_rows]
            assert tiled == list(range(len(tiled)))
        trained += len(tiled)
        # all that is sampled is trained, but for the end of a group that drop_last cuts off
        sampled = len(steps[0].rollout_prompts) * layout.geometry.num_generations
        assert 0 <= sampled - len(tiled) < (layout.geometry.num_generations if layout.drop_last else 1)
    assert trained == layout.trained_completions


@given(LAYOUTS)
def test_drop_last_drops_the_smaller_last_step_and_nothing_else(layout):
    whole = EpochLayout(layout.geometry, layout.num_prompts, drop_last=False)
    dropping = EpochLayout(layout.geometry, layout.num_prompts, drop_last=True)
    unit = layout.geometry.global_batch_size
    assert 0 <= whole.trained_completions - dropping.trained_completions < unit
    full = [s for s in steps_of(whole) if len(s.step_rows) == unit]
    places = [(s.rollout, s.iteration, s.step, s.step_rows) for s in full]
    assert [(s.rollout, s.iteration, s.step, s.step_rows) for s in steps_of(dropping)] == places
    # prompts that are dropped are not sampled either
    trained = ceil_div(dropping.trained_completions, layout.geometry.num_generations)
    assert all(s.rollout_prompts.stop <= trained for s in steps_of(dropping))


def test_equal_shares_are_checked_up_to_the_last_rollout():
    g = resolve(num_processes=2, global_batch_size=16)
    check_equal_shares(g, 10, drop_last=False)
    check_equal_shares(g, 9, drop_last=True)
    with pytest.raises(ConfigError, match="on 2 processes; choose a rollout_batch_size"):
        check_equal_shares(g, 9, drop_last=False)
