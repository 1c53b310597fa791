"""Geometry: sizes resolve as TRL means them, refusals name a remedy that works, layouts lose nothing."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.batching.plan_text import describe_plan
from grpo_ext.batching.sizes import (
    DEFAULT_ROLLOUT_CHUNK,
    BatchGeometry,
    EpochLayout,
    ceil_div,
    check_equal_slices,
    even_slice,
    geometry_of,
    process_prompts,
)
from grpo_ext.config import GRPOConfig
from grpo_ext.errors import ConfigError


def resolve(**sizes) -> BatchGeometry:
    names = {"micro_batch_size": "per_device_train_batch_size", "accumulation_steps": "gradient_accumulation_steps"}
    processes = sizes.pop("num_processes", 1)
    settings = {names.get(name, name): value for name, value in sizes.items()}
    return geometry_of({"num_generations": 4, "per_device_train_batch_size": 4, **settings}, processes)


def refusal(**sizes) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(**sizes)
    return str(caught.value)


def geometry(generations=2, prompts_per_step=3, steps_per_rollout=2, iterations=1, processes=1, micro=4, chunk=None):
    step = generations * prompts_per_step
    return BatchGeometry(
        num_generations=generations,
        global_batch_size=step,
        rollout_batch_size=step * steps_per_rollout,
        num_iterations=iterations,
        micro_batch_size=micro,
        num_processes=processes,
        rollout_chunk_size=chunk or generations,
    )


# ---- Refusals: the values, the rule and the remedy ------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, 0, -4, 2.0, "8", None, True])
def test_a_group_of_fewer_than_two_completions_is_refused(value):
    message = refusal(num_generations=value)
    assert f"num_generations={value!r}" in message
    assert "use 2 or more" in message


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("micro_batch_size", "per_device_train_batch_size"),
        ("accumulation_steps", "gradient_accumulation_steps"),
        ("num_processes", "num_processes"),
        ("num_iterations", "num_iterations"),
        ("global_batch_size", "global_batch_size"),
        ("rollout_batch_size", "rollout_batch_size"),
        ("generation_batch_size", "generation_batch_size"),
        ("steps_per_generation", "steps_per_generation"),
        ("rollout_chunk_size", "rollout_chunk_size"),
    ],
)
def test_a_size_that_is_no_positive_integer_is_refused_under_the_users_name(argument, name, value):
    message = refusal(**{argument: value})
    assert message.startswith(f"{name}={value!r} ")
    assert "whole number, 1 or more" in message


@pytest.mark.parametrize("value", [15, 3, 17])
def test_a_rollout_of_one_step_that_cuts_a_group_is_refused_with_sizes_that_work(value):
    message = refusal(global_batch_size=value, num_generations=4)
    assert f"global_batch_size={value}" in message
    assert "num_generations=4" in message
    for remedy in multiples_offered(message):
        assert resolve(global_batch_size=remedy, num_generations=4).global_batch_size == remedy
        assert abs(remedy - value) < 4
    assert resolve(global_batch_size=value, rollout_batch_size=rollout_offered(message)).global_batch_size == value


def rollout_offered(message: str) -> int:
    """The rollout batch that a message offers beside other global batches."""
    found = re.search(r"rollout_batch_size to (\d+)", message)
    assert found is not None, f"no remedy in {message!r}"
    return int(found.group(1))


def multiples_offered(message: str) -> list[int]:
    """The sizes that a message offers: "use 12 or 16", "set global_batch_size to 8"."""
    found = re.search(r"(?:use|global_batch_size to) (\d+)(?: or (\d+))?", message)
    assert found is not None, f"no remedy in {message!r}"
    return [int(size) for size in found.groups() if size is not None]


def test_trls_product_that_cuts_a_group_is_refused_with_all_three_factors():
    message = refusal(micro_batch_size=3, accumulation_steps=5, num_processes=2, num_generations=8)
    for part in (
        "per_device_train_batch_size=3",
        "gradient_accumulation_steps=5",
        "num_processes=2",
        "= 30 completions",
        "num_generations=8",
    ):
        assert part in message
    for remedy in multiples_offered(message):
        sizes = {"micro_batch_size": 3, "num_processes": 2, "num_generations": 8, "global_batch_size": remedy}
        assert resolve(**sizes).global_batch_size == remedy
    sizes = {"micro_batch_size": 3, "accumulation_steps": 5, "num_processes": 2, "num_generations": 8}
    assert resolve(**sizes, rollout_batch_size=rollout_offered(message)).global_batch_size == 30


@pytest.mark.parametrize(
    "phase", [{"rollout_batch_size": 18 * 3}, {"generation_batch_size": 18 * 3}, {"steps_per_generation": 9}]
)
def test_a_rollout_that_cuts_a_group_is_refused_with_multiples_that_work(phase):
    sizes = {"micro_batch_size": 6, "accumulation_steps": 3}
    message = refusal(**sizes, **phase)
    assert "=54 is not a multiple of num_generations=4; a rollout batch holds whole groups" in message
    assert multiples_offered(message) == [36, 72]
    for remedy in multiples_offered(message):
        assert resolve(**sizes, rollout_batch_size=remedy).rollout_batch_size == remedy


def test_the_remedy_for_a_rollout_that_cuts_steps_cuts_no_group_either():
    assert multiples_offered(refusal(global_batch_size=18, rollout_batch_size=40)) == [36, 72]
    assert "a multiple of 36" in refusal(global_batch_size=18, steps_per_generation=2)


@pytest.mark.parametrize("field", ["rollout_batch_size", "generation_batch_size"])
@pytest.mark.parametrize("value", [20, 40])
def test_a_rollout_that_cuts_an_optimizer_step_is_refused_with_multiples_that_work(field, value):
    message = refusal(global_batch_size=16, **{field: value})
    assert f"batch_size={value} is not a multiple" in message
    assert "global_batch_size=16" in message
    for remedy in multiples_offered(message):
        assert resolve(global_batch_size=16, rollout_batch_size=remedy).rollout_batch_size == remedy


def test_a_rollout_smaller_than_a_step_offers_the_step_alone():
    assert multiples_offered(refusal(global_batch_size=16, rollout_batch_size=8)) == [16]


@pytest.mark.parametrize("value", [7, 3])
def test_a_chunk_that_cuts_a_group_is_refused_with_multiples_that_work(value):
    message = refusal(rollout_chunk_size=value)
    assert f"rollout_chunk_size={value}" in message
    assert "num_generations=4" in message
    for remedy in multiples_offered(message):
        assert resolve(rollout_chunk_size=remedy).rollout_chunk_size == remedy


def test_a_contradicting_accumulation_is_refused_and_removing_it_works():
    sizes = {"global_batch_size": 32, "micro_batch_size": 4, "num_processes": 2}
    message = refusal(**sizes, accumulation_steps=3)
    for part in (
        "gradient_accumulation_steps=3",
        "global_batch_size=32",
        "per_device_train_batch_size=4",
        "2 process(es)",
        "derived as 4",
        "remove gradient_accumulation_steps",
    ):
        assert part in message
    assert resolve(**sizes).accumulation_steps == 4
    assert resolve(**sizes, accumulation_steps=4) == resolve(**sizes)


def test_two_names_for_the_rollout_are_refused_unless_they_agree():
    message = refusal(global_batch_size=8, rollout_batch_size=16, generation_batch_size=32)
    assert "rollout_batch_size=16" in message
    assert "generation_batch_size=32" in message
    assert "set rollout_batch_size alone" in message
    agreeing = resolve(global_batch_size=8, rollout_batch_size=16, generation_batch_size=16)
    assert agreeing.rollout_batch_size == 16


@pytest.mark.parametrize("field", ["rollout_batch_size", "generation_batch_size"])
def test_steps_per_generation_beside_a_rollout_size_is_refused(field):
    message = refusal(steps_per_generation=2, **{field: 8})
    assert "steps_per_generation=2" in message
    assert "rollout_batch_size=8" in message
    assert "set rollout_batch_size alone" in message


def test_steps_per_generation_beside_a_global_batch_is_refused_because_it_would_depend_on_the_hardware():
    message = refusal(steps_per_generation=2, global_batch_size=8)
    assert "steps_per_generation=2" in message
    assert "global_batch_size=8" in message
    assert "set rollout_batch_size (a multiple of 8)" in message


# ---- TRL's meaning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [2, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("phase", [{}, {"steps_per_generation": 8}, {"generation_batch_size": 64}])
def test_trls_fields_give_trls_sizes(micro, accumulation, phase):
    sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation, "num_generations": 2}
    theirs = trl.GRPOConfig(use_cpu=True, report_to="none", **sizes, **phase)
    ours = resolve(num_generations=2, micro_batch_size=micro, accumulation_steps=accumulation, **phase)
    assert ours.global_batch_size == micro * accumulation
    assert ours.rollout_batch_size == theirs.generation_batch_size
    assert ours.accumulation_steps == theirs.gradient_accumulation_steps
    assert ours.steps_per_rollout * accumulation == theirs.steps_per_generation


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_trls_product_counts_every_process(processes):
    g = resolve(micro_batch_size=4, accumulation_steps=3, num_processes=processes)
    assert g.global_batch_size == 4 * 3 * processes
    phases = resolve(micro_batch_size=4, accumulation_steps=3, num_processes=processes, steps_per_generation=6)
    assert phases.rollout_batch_size == 4 * 6 * processes
    assert phases.steps_per_rollout == 2


@pytest.mark.parametrize("phase", [{"steps_per_generation": 6}, {"generation_batch_size": 36}])
def test_a_step_may_cut_groups_as_in_trl(phase):
    sizes = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "num_generations": 4}
    theirs = trl.GRPOConfig(use_cpu=True, report_to="none", **sizes, **phase)
    for g in (
        resolve(micro_batch_size=6, accumulation_steps=3, **phase),
        GRPOConfig(use_cpu=True, report_to="none", **sizes, **phase).geometry,
        GRPOConfig.from_trl(theirs).geometry,
    ):
        assert (g.global_batch_size, g.rollout_batch_size) == (18, theirs.generation_batch_size) == (18, 36)
        assert (g.steps_per_rollout, g.prompts_per_rollout, g.accumulation_steps) == (2, 9, 3)


@pytest.mark.parametrize(
    "phase", [{"steps_per_generation": 1}, {"steps_per_generation": 2}, {"generation_batch_size": 4}]
)
def test_several_phases_within_a_step_are_one_phase(phase):
    g = resolve(micro_batch_size=4, accumulation_steps=4, **phase)
    assert g.rollout_batch_size == g.global_batch_size == 16


def test_without_a_rollout_size_a_rollout_is_one_step():
    g = resolve(global_batch_size=24)
    assert (g.rollout_batch_size, g.steps_per_rollout, g.prompts_per_rollout) == (24, 1, 6)


@given(st.integers(2, 9), st.integers(1, 40), st.integers(1, 17), st.integers(1, 9), st.integers(1, 4))
def test_the_derived_accumulation_is_rounded_up_never_floored(generations, prompts, micro, processes, steps):
    total = generations * prompts
    g = resolve(
        num_generations=generations,
        global_batch_size=total,
        rollout_batch_size=total * steps,
        micro_batch_size=micro,
        num_processes=processes,
    )
    busiest = math.ceil(Fraction(total, processes))
    assert g.accumulation_steps == math.ceil(Fraction(busiest, micro))
    assert g.accumulation_steps * micro * processes >= total
    assert g.global_batch_size == total  # whatever the layout
    assert (g.prompts_per_rollout, g.steps_per_rollout) == (prompts * steps, steps)


@given(st.integers(2, 100))
def test_the_default_chunk_is_whole_groups_and_at_least_one(generations):
    chunk = resolve(num_generations=generations, global_batch_size=generations).rollout_chunk_size
    assert chunk % generations == 0
    assert chunk == generations or chunk <= DEFAULT_ROLLOUT_CHUNK
    assert chunk + generations > DEFAULT_ROLLOUT_CHUNK  # no room for another group


# ---- Shares and micro-batches ---------------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 40))
def test_even_shares_tile_the_whole_in_order_and_differ_by_at_most_one(total, parts):
    shares = [even_slice(total, parts, i) for i in range(parts)]
    assert [item for share in shares for item in share] == list(range(total))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


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


def test_processes_without_a_chunk_have_an_empty_share():
    shares = [process_prompts(4, 2, 4, 5, rank) for rank in range(5)]
    assert [list(share) for share in shares] == [[0, 1], [2, 3], [], [], []]


def test_a_chunk_smaller_than_a_group_still_holds_one_group():
    assert [len(process_prompts(3, 8, 4, 3, rank)) for rank in range(3)] == [1, 1, 1]


# ---- Epochs ---------------------------------------------------------------------------------------------------------


def cutting(generations: int, rows_per_step: int, multiples: int, iterations: int) -> BatchGeometry:
    """Steps of any number of completions, rollouts of whole groups."""
    return BatchGeometry(
        num_generations=generations,
        global_batch_size=rows_per_step,
        rollout_batch_size=math.lcm(generations, rows_per_step) * multiples,
        num_iterations=iterations,
        micro_batch_size=4,
        num_processes=1,
        rollout_chunk_size=generations,
    )


LAYOUTS = st.builds(
    EpochLayout,
    st.builds(cutting, st.integers(2, 4), st.integers(1, 18), st.integers(1, 3), st.integers(1, 3)),
    st.integers(0, 50),
    st.booleans(),
)


def steps_of(layout: EpochLayout):
    return [layout[i] for i in range(len(layout))]


def rows_of(layout: EpochLayout, step) -> list[int]:
    """A step's completions, counted along the epoch's order."""
    first = step.rollout_prompts.start * layout.geometry.num_generations
    return [first + row for row in step.step_rows]


@given(LAYOUTS)
def test_every_completion_is_in_exactly_num_iterations_steps(layout):
    counts = dict.fromkeys(range(layout.num_prompts * layout.geometry.num_generations), 0)
    for step in steps_of(layout):
        for row in rows_of(layout, step):
            counts[row] += 1
    expected = layout.geometry.num_iterations
    assert all(counts[row] == (expected if row < layout.trained_completions else 0) for row in counts)


@given(LAYOUTS)
def test_the_steps_of_a_rollout_tile_it_and_only_the_first_samples(layout):
    rollouts: dict[int, list] = {}
    for step in steps_of(layout):
        rollouts.setdefault(step.rollout, []).append(step)
    assert sorted(rollouts) == list(range(len(rollouts)))
    for steps in rollouts.values():
        assert len({step.rollout_prompts for step in steps}) == 1
        assert [step.starts_rollout for step in steps] == [True] + [False] * (len(steps) - 1)
        assert [(s.iteration, s.step) for s in steps] == sorted((s.iteration, s.step) for s in steps)
        sampled = len(steps[0].rollout_prompts) * layout.geometry.num_generations
        for iteration in range(layout.geometry.num_iterations):
            tiled = [row for s in steps if s.iteration == iteration for row in s.step_rows]
            assert tiled == list(range(len(tiled)))
            # all that is sampled is trained, but for the end of a group that drop_last cuts off
            assert 0 <= sampled - len(tiled) < (layout.geometry.num_generations if layout.drop_last else 1)


@given(LAYOUTS)
def test_only_the_last_step_of_the_last_rollout_may_be_smaller(layout):
    full, steps = layout.geometry.global_batch_size, steps_of(layout)
    sizes = [len(step.step_rows) for step in steps]
    tail = layout.trained_completions % full
    smaller = [step for step, size in zip(steps, sizes) if size != full]
    assert [(s.rollout, s.iteration) for s in smaller] == (
        [(steps[-1].rollout, i) for i in range(layout.geometry.num_iterations)] if tail else []
    )
    assert all(len(s.step_rows) == tail for s in smaller)
    assert all(size > 0 for size in sizes)
    assert layout.last_step_rows == (sizes[-1] if sizes else 0)


@given(LAYOUTS)
def test_drop_last_drops_the_smaller_last_step_and_nothing_else(layout):
    kept = EpochLayout(layout.geometry, layout.num_prompts, drop_last=False)
    dropping = EpochLayout(layout.geometry, layout.num_prompts, drop_last=True)
    unit = layout.geometry.global_batch_size
    assert 0 <= kept.trained_completions - dropping.trained_completions < unit
    full = [s for s in steps_of(kept) if len(s.step_rows) == unit]
    places = [(s.rollout, s.iteration, s.step, s.step_rows) for s in full]
    assert [(s.rollout, s.iteration, s.step, s.step_rows) for s in steps_of(dropping)] == places
    # prompts that are dropped are not sampled either
    assert all(s.rollout_prompts.stop <= dropping.trained_prompts for s in steps_of(dropping))
    assert dropping.trained_prompts == ceil_div(dropping.trained_completions, layout.geometry.num_generations)


def test_a_step_takes_up_the_group_that_the_one_before_has_cut():
    g = resolve(global_batch_size=18, rollout_batch_size=36)
    steps = steps_of(EpochLayout(g, 11))  # rollouts of 9 and 2 prompts
    assert [s.step_rows for s in steps] == [range(0, 18), range(18, 36), range(0, 8)]
    assert [s.rollout_prompts for s in steps] == [range(0, 9), range(0, 9), range(9, 11)]
    cut = EpochLayout(g, 5, drop_last=True)  # 20 completions: the last two of the fifth prompt are left out
    assert (len(cut), cut.trained_prompts, cut.trained_completions, cut.last_step_rows) == (1, 5, 18, 18)


def test_a_data_set_smaller_than_a_step_is_one_step():
    g = geometry(prompts_per_step=8, steps_per_rollout=3, iterations=2)
    layout = EpochLayout(g, 5)
    steps = steps_of(layout)
    assert [(s.rollout, s.iteration, s.step) for s in steps] == [(0, 0, 0), (0, 1, 0)]
    assert all(rows_of(layout, s) == list(range(10)) for s in steps)
    assert len(EpochLayout(g, 5, drop_last=True)) == 0


@pytest.mark.parametrize("index", [-1, 4])
def test_a_step_outside_the_epoch_is_an_index_error(index):
    with pytest.raises(IndexError, match=f"step {index} of an epoch of 4 steps"):
        EpochLayout(geometry(prompts_per_step=2, steps_per_rollout=2), 8)[index]


# ---- The plan for people --------------------------------------------------------------------------------------------


def test_the_plan_states_the_sizes_and_what_is_dropped():
    g = geometry(generations=4, prompts_per_step=3, steps_per_rollout=2, iterations=2, processes=2, micro=5, chunk=8)
    text = describe_plan(g, num_prompts=10, drop_last=True, epochs=2.0)
    for part in (
        "12 completions = 3 prompts x 4",
        "24 completions, 3 chunk(s) of up to 8",
        "2 x 2 iteration(s)",
        "up to 5 completions per device",
        "10 prompts = 6 optimizer steps, 1 prompt(s) dropped",
        "3 prompts = 12 completions",
        "2 epoch(s), about 12 optimizer steps",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "dropped" not in describe_plan(g, num_prompts=9, drop_last=True, epochs=None)


def test_the_plan_says_that_steps_cut_groups():
    g = resolve(global_batch_size=18, rollout_batch_size=36)
    text = describe_plan(g, num_prompts=5, drop_last=True, epochs=None)
    for part in ("18 completions = 4.5 prompts x 4", "steps cut groups", "1 optimizer steps, 2 completion(s) dropped"):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "2 completions" in describe_plan(g, num_prompts=5, drop_last=False, epochs=None)
    assert "cut groups" not in describe_plan(resolve(global_batch_size=16), 5, False, None)


def test_the_plan_says_when_processes_have_nothing_to_sample():
    idle = describe_plan(geometry(chunk=12, processes=4), 12, False, None)
    assert "only 1 of 4 processes sample; rollout_chunk_size=2 spreads it" in idle
    assert "only" not in describe_plan(geometry(chunk=2, processes=4), 12, False, None)
    assert "not known, for want of data" in describe_plan(geometry(), None, False, None)


@pytest.mark.parametrize(
    ("processes", "num_prompts", "drop_last", "fits"),
    [
        (1, 7, False, True),
        (2, 8, False, True),
        (2, 10, False, True),
        (2, 9, False, False),
        (2, 9, True, True),
        (3, 8, False, False),
    ],
)
def test_equal_shares_are_checked_up_to_the_last_rollout(processes, num_prompts, drop_last, fits):
    g = resolve(num_generations=4, num_processes=processes, micro_batch_size=4, global_batch_size=16)
    if fits:
        check_equal_slices(g, num_prompts, drop_last)
        return
    with pytest.raises(ConfigError, match=f"on {processes} processes; choose a rollout_batch_size"):
        check_equal_slices(g, num_prompts, drop_last)
