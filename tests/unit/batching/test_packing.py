"""The layout of a pack: every token where it belongs, each prompt once."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.batching.packing import PackedGroup, build_pack, rows_by_run

GROUPS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=4)), min_size=1, max_size=4
)


def test_rows_with_one_prompt_are_a_group():
    assert rows_by_run([0, 0, 1, 0, 1, 2]) == [[0, 1, 3], [2, 4], [5]]
    assert rows_by_run([]) == []


def test_a_pack_by_hand():
    # a prompt of 2, completions of 3 and 1
    pack = build_pack([2, 2], [3, 1], [[0, 1]], keep_last=False)
    assert pack.source_N.tolist() == [0, 1, 2, 3]
    assert pack.positions_N.tolist() == [0, 1, 2, 3]
    assert pack.predictor_S.tolist() == [1, 2, 3, 1]
    assert pack.layout.groups == (PackedGroup((0, 2), ((2, 4), (4, 4)), (3, 1)),)
    assert pack.counts_N.tolist() == [2, 2, 1, 1]


@given(GROUPS, st.booleans(), st.integers(1, 8))
def test_every_completion_token_is_predicted_by_the_token_before_it(groups, keep_last, multiple):
    prompts = [prompt for prompt, completions in groups for _ in completions]
    completions = [length for _, lengths in groups for length in lengths]
    runs, start = [], 0
    for _, lengths in groups:
        runs.append(range(start, start + len(lengths)))
        start += len(lengths)
    begins = [sum(prompts[:row]) + sum(completions[:row]) for row in range(len(prompts))]
    pack = build_pack(prompts, completions, runs, keep_last, multiple)
    assert pack.layout.tokens == len(pack.source_N) == len(pack.positions_N)
    assert pack.layout.tokens % multiple == 0
    assert len(pack.predictor_S) == sum(completions)
    scored = iter(pack.predictor_S.tolist())
    for row, length in enumerate(completions):
        first = next(rows[0] for rows in runs if row in rows)
        for t in range(length):
            source = int(pack.source_N[next(scored)])
            holder = first if t == 0 else row  # the prompt is that of the group's first row
            assert source == begins[holder] + prompts[holder] + t - 1
    real = [n for n in pack.counts_N.tolist() if n]
    assert sum(real) == sum(p + (c if keep_last else max(c - 1, 0)) for p, c in zip(prompts, completions))
