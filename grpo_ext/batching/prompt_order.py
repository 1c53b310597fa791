"""Loaders: one item per optimizer step, with the rows that this process samples for the step's rollout batch.

Differs from TRL's `RepeatSampler`: the order depends only on (seed, epoch), no prompt is dropped, and every process
takes its part of the same order, so the number of processes changes nothing. Feeds rollouts.source.
"""

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..algorithms.keyed_random import (
    EVAL_STREAM,
    FURTHER_STREAM,
    ORDER_STREAM,
    TRAIN_STREAM,
    completion_keys,
    derive_key,
    mix,
)
from ..errors import ConfigError
from .sizes import BatchGeometry, EpochLayout, StepLayout, ceil_div, process_prompts, step_layout

FIRST_ADDED = 1 << 40  # prompts that a user's override adds are numbered from here


@dataclass(frozen=True)
class RolloutRequest:
    epoch: int
    layout: StepLayout
    prompts: range  # positions in the rollout batch
    stands_in: bool  # the process has no prompts; its rows are stand-ins that must not reach any result
    num_generations: int  # completions per prompt; rows repeat each prompt this often
    first_prompt: int = 0  # number of the first prompt of a further round (dynamic sampling), for keys
    columns: Sequence[str] = ()  # the keys of all rows of all processes
    repeat: int = 0  # how often a user's override has called TRL's method before; each draws other random numbers
    row_numbers: Sequence[int] = ()  # the data set's rows of the prompts of all processes; none for a stream

    @property
    def name(self) -> tuple[int, int]:
        """The epoch of the rollout batch, and its index in the epoch."""
        return self.epoch, self.layout.rollout


@dataclass(frozen=True)
class StepRows(Sequence[dict[str, Any]]):
    """This process's rows of a rollout batch, instead of TRL's list of rows."""

    rows: list[dict[str, Any]]  # one per completion; empty if a map-style set's step continues a rollout batch
    request: RolloutRequest
    numbers: Sequence[int] = ()  # rows with one number are copies of one row; none where a user calls TRL's method

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @staticmethod
    def checked(item: Any) -> "StepRows":
        if isinstance(item, StepRows):
            return item
        raise ConfigError(
            f"the loader returned a {type(item).__name__} instead of StepRows; a subclass that overrides "
            "get_train_dataloader or get_eval_dataloader should change the data set instead."
        )


@functools.lru_cache(maxsize=4)
def prompt_order(num_prompts: int, seed: int, epoch: int) -> Sequence[int]:
    return _shuffled(num_prompts, seed, ORDER_STREAM, epoch)


def _shuffled(count: int, *key: int) -> list[int]:
    generator = torch.Generator().manual_seed(derive_key(*key) >> 1)  # 63 bits: torch seeds are signed
    return torch.randperm(count, generator=generator).tolist()


@dataclass(frozen=True)
class ProcessSlices:
    num_generations: int
    chunk_size: int
    num_processes: int
    rank: int

    def request(
        self, epoch: int, layout: StepLayout, num_prompts: int | None = None, first_prompt: int = 0
    ) -> RolloutRequest:
        """This process's part of a rollout batch, or of a further round of `num_prompts`; see `stands_in`."""
        num_prompts = len(layout.rollout_prompts) if num_prompts is None else num_prompts
        prompts = process_prompts(num_prompts, self.num_generations, self.chunk_size, self.num_processes, self.rank)
        return RolloutRequest(epoch, layout, prompts or range(1), not prompts, self.num_generations, first_prompt)

    def rows(self, request: RolloutRequest, prompts: Any, numbers: Sequence[int] | None = None) -> StepRows:
        """Rows of a request, a copy for each completion, because rewards and tools may write to it.

        If rows may have different keys, the rows of all processes are read, because the columns are the keys of all.
        `numbers` are the data set's rows of the rollout batch; without them, `prompts` are those of the rollout batch.
        """
        places = range(len(request.layout.rollout_prompts)) if numbers is None else numbers
        chosen = [places[position] for position in request.prompts for _ in range(self.num_generations)]
        alike = getattr(prompts, "format", {"type": "custom"})["type"] != "custom"  # a transform's keys may differ
        read = {place: prompts[place] for place in (dict.fromkeys(chosen) if alike else places)}
        columns = tuple(dict.fromkeys(name for row in read.values() for name in row))
        rows = [copy.deepcopy(read[place]) for place in chosen]
        return StepRows(rows, replace(request, columns=columns, row_numbers=tuple(numbers or ())), chosen)


class EpochSteps(Sampler[list[int]]):
    """A batch sampler of one step per item, counted over all epochs, so that skipping on resume loads nothing."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        return ([self.epoch * self.num_steps + step] for step in range(self.num_steps))


class _OverPrompts:
    """A data set of steps with the attributes of the user's data set, which TRL's loader would have."""

    def __getattr__(self, name: str) -> Any:
        users = vars(self).get("prompts", vars(self).get("stream"))
        if users is None or name.startswith("_"):  # while it is copied; `__getitems__` would be called for rows
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(users, name)


@dataclass(eq=False)
class StepDataset(_OverPrompts, Dataset):
    prompts: Any
    layout: EpochLayout | list[StepLayout]  # the steps of an epoch
    rule: ProcessSlices
    seed: int = 0
    shuffle: bool = False
    ahead: bool = False  # rows are requested before their step (`rows`), so the steps have none

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, step: int) -> StepRows:
        request = self.request(step)
        return self.rows(request) if request.layout.starts_rollout and not self.ahead else StepRows([], request)

    def request(self, step: int) -> RolloutRequest:
        """The request of an optimizer step, counted from 0 over all epochs."""
        epoch, inside = divmod(step, len(self.layout))
        return self.rule.request(epoch, self.layout[inside])

    def rows(self, request: RolloutRequest) -> StepRows:
        order, start = self._order(request), request.layout.rollout_prompts.start
        return self.rule.rows(request, self.prompts, order[start : start + len(request.layout.rollout_prompts)])

    def further_rows(self, request: RolloutRequest, taken: int, count: int) -> StepRows | None:
        """Rows of up to `count` further prompts, after the first `taken`; None if none are left.

        The order of the rest of the data set depends only on (seed, epoch, rollout): not on the number of processes,
        nor on prompts that other rollouts took.
        """
        layout, order = request.layout, self._order(request)
        used = {order[position] for position in layout.rollout_prompts}
        mixed = _shuffled(len(self.prompts), self.seed, FURTHER_STREAM, request.epoch, layout.rollout)
        chosen = [prompt for prompt in mixed if prompt not in used][taken : taken + count]
        if not chosen:
            return None
        further = self.rule.request(request.epoch, layout, len(chosen), len(layout.rollout_prompts) + taken)
        return self.rule.rows(further, self.prompts, chosen)

    def _order(self, request: RolloutRequest) -> Sequence[int]:
        count = len(self.prompts)
        return prompt_order(count, self.seed, request.epoch) if self.shuffle else range(count)


@dataclass(eq=False)
class StepStream(_OverPrompts, IterableDataset):
    """Every process reads the whole stream and keeps its part of each rollout batch.

    The stream repeats, because the Trainer treats a loader without a length as one long epoch. So skipping the trained
    steps resumes at the same place.
    """

    stream: Any
    geometry: BatchGeometry
    rule: ProcessSlices
    drop_last: bool

    def __iter__(self) -> Iterator[StepRows]:
        for epoch in itertools.count():
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)  # reshuffles a shuffled stream
            rows = iter(self.stream)
            for rollout in itertools.count():
                batch = list(itertools.islice(rows, self.geometry.prompts_per_rollout))
                layout = EpochLayout(self.geometry, len(batch), self.drop_last)
                for inside in range(len(layout)):
                    step = step_layout(self.geometry, rollout, inside, layout.trained_completions)
                    yield self.rule.rows(self.rule.request(epoch, step), batch)
                if not len(layout):
                    break
            if not rollout:  # nothing to train on
                return


class StepLoader(DataLoader):
    """Passes on the epoch; never sharded: its items are this process's rows."""

    micro_batches: int | None = None  # the length of an evaluation for progress bars; None: the number of items

    def __len__(self) -> int:
        return super().__len__() if self.micro_batches is None else self.micro_batches

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.batch_sampler, EpochSteps):  # a stream counts its own passes
            self.batch_sampler.set_epoch(epoch)


_WORKERS = ("num_workers", "persistent_workers", "prefetch_factor")  # arguments of `DataLoader`


def make_loader(prompts: Any, rule: ProcessSlices, geometry: BatchGeometry, args: Any, shuffle: bool) -> StepLoader:
    """A loader of a map-style data set, or of a stream, which is always read in this process."""
    seed, drop_last = args.seed, args.dataloader_drop_last
    if not hasattr(prompts, "__len__"):
        stream = prompts.shuffle(seed=seed) if shuffle and hasattr(prompts, "shuffle") else prompts
        steps = StepStream(stream, geometry, rule, drop_last)
        return StepLoader(steps, batch_size=None, collate_fn=lambda item: item, num_workers=0)
    layout = EpochLayout(geometry, len(prompts), drop_last)
    dataset = StepDataset(prompts, layout, rule, seed, shuffle, ahead=args.rollout_lag > 0)
    workers = {name: getattr(args, f"dataloader_{name}") for name in _WORKERS}
    return StepLoader(dataset, batch_sampler=EpochSteps(len(layout)), collate_fn=itemgetter(0), **workers)


def make_eval_loader(prompts: Any, rule: ProcessSlices, micro_batch: int) -> StepLoader:
    """One item with the whole set, so that metrics are means over it; its length counts micro-batches."""
    rows = prompts if hasattr(prompts, "__len__") else list(prompts)
    layout = StepLayout(0, 0, 0, range(len(rows)), range(len(rows) * rule.num_generations))
    dataset = StepDataset(rows, [layout], rule)
    keys = [[0]] if len(rows) else []  # the same in every epoch, so every evaluation samples with the same keys
    loader = StepLoader(dataset, batch_sampler=keys, collate_fn=itemgetter(0))
    loader.micro_batches = ceil_div(len(rows) * rule.num_generations, rule.num_processes * micro_batch)
    return loader


def request_keys(request: RolloutRequest, rows: int, seed: int, training: bool) -> list[int]:
    """Keys of rows of this process, one per completion; a user's override may sample more rows than the request has."""
    stream = TRAIN_STREAM if training else EVAL_STREAM
    place, group = (stream, request.epoch, request.layout.rollout), request.num_generations
    prompts = (torch.tensor(list(request.prompts)) + request.first_prompt).repeat_interleave(group)
    keys_B = completion_keys(seed, *place, prompts, torch.arange(group).repeat(len(request.prompts)))
    if (missing := rows - len(keys_B)) > 0:
        prompts = torch.arange(missing) + FIRST_ADDED + (request.prompts.start << 20)
        keys_B = torch.cat([keys_B, completion_keys(seed, *place, prompts, torch.zeros_like(prompts))])
    return (mix(keys_B, request.repeat) if request.repeat else keys_B)[:rows].tolist()
