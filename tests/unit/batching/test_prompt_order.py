"""Prompt order: a function of (seed, epoch) alone, the same for every process count; every process takes its share."""

import math
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.batching.prompt_order import ProcessSlices, make_loader, prompt_order
from grpo_ext.batching.sizes import BatchGeometry, EpochLayout


def geometry(step=6, rollouts=2, generations=3, iterations=1, chunk_groups=1):
    """Steps of any number of completions, which may cut groups."""
    rollout = math.lcm(step, generations) * rollouts
    return BatchGeometry(generations, step, rollout, iterations, 4, 1, rollout_chunk_size=chunk_groups * generations)


class Stream:
    """A stream without a length that counts what is read."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def set_epoch(self, epoch: int) -> None:  # as a stream of `datasets` has one
        self.epoch = epoch

    def __iter__(self):
        for i in range(self.count):
            self.read += 1
            yield {"prompt": f"p{i}", "answer": i}


def loader(prompts, g, processes=1, rank=0, *, shuffle=True, drop_last=False):
    workers = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
    args = SimpleNamespace(seed=42, dataloader_drop_last=drop_last, rollout_lag=0)
    vars(args).update({f"dataloader_{name}": value for name, value in workers.items()})
    rule = ProcessSlices(g.num_generations, g.rollout_chunk_size, processes, rank)
    return make_loader(prompts, rule, g, args, shuffle)


def test_the_order_is_a_function_of_seed_and_epoch():
    expected = prompt_order(50, seed=1, epoch=2)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert prompt_order(50, seed=1, epoch=2) == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(expected) == list(range(50))
    assert len({tuple(prompt_order(50, seed, epoch)) for seed in (1, 2) for epoch in (2, 3)} | {tuple(range(50))}) == 5


SPLITS = st.tuples(
    st.integers(1, 25),  # prompts
    st.builds(geometry, st.integers(1, 12), st.integers(1, 3), st.integers(2, 3), st.integers(1, 2), st.integers(1, 3)),
    st.integers(1, 6),  # processes
    st.booleans(),  # drop_last
)


@given(SPLITS)
def test_the_shares_of_all_processes_are_the_rollout_in_global_order(split):
    count, g, processes, drop_last = split
    prompts = [{"prompt": f"p{i}"} for i in range(count)]
    layout = EpochLayout(g, count, drop_last)
    loaders = [loader(prompts, g, processes, rank, drop_last=drop_last) for rank in range(processes)]
    for part in loaders:
        assert len(part) == len(layout)
        part.set_epoch(3)
    order = prompt_order(count, 42, 3)
    steps = [list(part) for part in loaders]
    assert {len(s) for s in steps} == {len(layout)}
    for index, parts in enumerate(zip(*steps)):
        expected = [f"p{order[i]}" for i in layout[index].rollout_prompts for _ in range(g.num_generations)]
        if not layout[index].starts_rollout:
            assert not any(parts)  # the rollout batch is at hand; a run that lost it asks for its rows
            parts = [part_of.dataset.rows(part.request) for part_of, part in zip(loaders, parts)]
        real = [part for part in parts if not part.request.stands_in]
        assert [row["prompt"] for part in real for row in part] == expected
        for part in parts:
            assert part.request.layout == layout[index]
            assert part.request.epoch == 3
            assert part.request.num_generations == g.num_generations
            assert len(part) == len(part.request.prompts) * g.num_generations
            assert all(row == part[i - i % g.num_generations] for i, row in enumerate(part))


def test_a_stream_is_read_one_rollout_at_a_time():
    stream = Stream(100)
    steps = iter(loader(stream, geometry(), shuffle=False))  # rollout batches of two steps of two prompts
    for _ in range(2):
        next(steps)
    assert (stream.read, stream.epoch) == (4, 0)
    assert list(loader(Stream(0), geometry(), shuffle=False)) == []
