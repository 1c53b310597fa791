"""Loaders: one item per optimizer step, holding the rows this process samples from for the step's rollout batch.

Differs from TRL's `RepeatSampler`: the order depends on (seed, epoch) alone, no prompt is dropped, and every process
walks the same order and takes its own part of it, so the number of processes changes nothing. Feeds rollouts.source.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..algorithms.keyed_random import FURTHER_STREAM, ORDER_STREAM, derive_key
from ..errors import ConfigError
from .sizes import BatchGeometry, EpochLayout, StepLayout, ceil_div, process_prompts, step_layout


@dataclass(frozen=True)
class RolloutRequest:
    """Which prompts of a rollout batch this process samples."""

    epoch: int
    layout: StepLayout
    prompts: range  # positions in the rollout batch
    empty: bool  # the process has no prompts; its rows are a stand-in that must not reach any result
    num_generations: int  # completions per prompt; rows repeat each prompt this often
    first_prompt: int = 0  # what the prompts of a further round (dynamic sampling) are numbered from, for their keys
    columns: Sequence[str] = ()  # the keys that any row of any process has

    @property
    def name(self) -> tuple[int, int]:
        """What identifies the rollout batch: its epoch, and its index in the epoch."""
        return self.epoch, self.layout.rollout


@dataclass(frozen=True)
class StepRows(Sequence[dict[str, Any]]):
    """The rows of one process for one rollout batch, in the place of TRL's list of rows."""

    rows: list[dict[str, Any]]  # one for each completion; empty in a map-style set's step that goes on with a batch
    request: RolloutRequest
    numbers: Sequence[int] = ()  # rows with one number are copies of one row; none where a user calls TRL's method

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @staticmethod
    def checked(item: Any) -> StepRows:
        """The item of a loader; a ConfigError where it is not a `StepRows`."""
        if isinstance(item, StepRows):
            return item
        raise ConfigError(
            f"the loader gave a {type(item).__name__}, but steps are read as StepRows; a subclass that overrides "
            "get_train_dataloader or get_eval_dataloader should change the data set instead."
        )


@functools.lru_cache(maxsize=4)
def prompt_order(num_prompts: int, seed: int, epoch: int, shuffle: bool = True) -> Sequence[int]:
    """The order in which an epoch visits the prompts: a function of (seed, epoch) alone."""
    return _shuffled(num_prompts, seed, ORDER_STREAM, epoch) if shuffle else range(num_prompts)


def _shuffled(count: int, *key: int) -> list[int]:
    generator = torch.Generator().manual_seed(derive_key(*key) >> 1)  # 63 bits: torch seeds are signed
    return torch.randperm(count, generator=generator).tolist()


@dataclass(frozen=True)
class ProcessSlices:
    """How a rollout batch is assigned to processes for sampling."""

    num_generations: int
    chunk_size: int
    num_processes: int
    rank: int

    def request(
        self, epoch: int, layout: StepLayout, num_prompts: int | None = None, first_prompt: int = 0
    ) -> RolloutRequest:
        """The request of this process for the rollout batch of `layout`; one without prompts borrows the first.

        Args:
            num_prompts, first_prompt: for a further round: how many prompts, and the number of the first.
        """
        num_prompts = len(layout.rollout_prompts) if num_prompts is None else num_prompts
        prompts = process_prompts(num_prompts, self.num_generations, self.chunk_size, self.num_processes, self.rank)
        empty = len(prompts) == 0
        prompts = range(1) if empty else prompts
        return RolloutRequest(epoch, layout, prompts, empty, self.num_generations, first_prompt)

    def rows(self, request: RolloutRequest, prompts: Any, numbers: Sequence[int] | None = None) -> StepRows:
        """The rows of a request, a copy for each completion, since rewards and tools may write to it.

        Where rows may have different keys, those of all processes are read, because the columns are the keys of all.

        Args:
            prompts: the data set; or the prompts of the rollout batch, where they have no `numbers`.
            numbers: the row of the data set for each position in the rollout batch.
        """
        places = range(len(request.layout.rollout_prompts)) if numbers is None else numbers
        chosen = [places[position] for position in request.prompts for _ in range(self.num_generations)]
        alike = getattr(prompts, "format", {"type": "custom"})["type"] != "custom"  # those of a transform may differ
        read = {place: prompts[place] for place in (dict.fromkeys(chosen) if alike else places)}
        columns = tuple(dict.fromkeys(name for row in read.values() for name in row))
        rows = [copy.deepcopy(read[place]) for place in chosen]
        return StepRows(rows, replace(request, columns=columns), chosen)


class EpochSteps(Sampler[list[int]]):
    """Batch sampler of one step, counted over all epochs, per item, so that skipping on resume loads nothing."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        return ([self.epoch * self.num_steps + step] for step in range(self.num_steps))


class _OverPrompts:
    """A data set of steps that hands attributes it does not have to the user's set, as TRL's loader has that set."""

    def __getattr__(self, name: str) -> Any:
        users = vars(self).get("prompts", vars(self).get("stream"))
        if users is None or name.startswith("_"):  # a copy in the making; `__getitems__` would be asked for rows
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(users, name)


@dataclass(eq=False)
class StepDataset(_OverPrompts, Dataset):
    """A map-style data set of optimizer steps over a map-style data set of prompts."""

    prompts: Any
    layout: EpochLayout | list[StepLayout]  # the steps of an epoch
    rule: ProcessSlices
    seed: int = 0
    shuffle: bool = False
    ahead: bool = False  # rows are asked for before their step (`rows`), so the steps come without

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
        """The rows of a rollout batch; steps that go on with one come without."""
        order, start = self._order(request), request.layout.rollout_prompts.start
        return self.rule.rows(request, self.prompts, order[start : start + len(request.layout.rollout_prompts)])

    def further_rows(self, request: RolloutRequest, taken: int, count: int) -> StepRows | None:
        """This process's rows of up to `count` further prompts, after the `taken` first; None where none is left.

        They are the rest of the data set, in an order that (seed, epoch, rollout) decide. So they do not depend on the
        number of processes, nor on what other rollouts took, and a resumed run finds the same.
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
        return prompt_order(len(self.prompts), self.seed, request.epoch, self.shuffle)


class StepStream(_OverPrompts, IterableDataset):
    """Optimizer steps over a stream: every process reads the whole stream and keeps its part of each rollout batch.

    It repeats the stream, because the Trainer takes a loader without a length for one long epoch. So skipping as many
    steps as were trained resumes at the same place.
    """

    def __init__(self, stream: Any, geometry: BatchGeometry, rule: ProcessSlices, drop_last: bool) -> None:
        self.stream, self.geometry, self.rule, self.drop_last = stream, geometry, rule, drop_last

    def __iter__(self) -> Iterator[StepRows]:
        for epoch in itertools.count():
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)  # reshuffles a shuffled stream
            empty = True
            for rows in self._pass(epoch):
                empty = False
                yield rows
            if empty:
                return

    def _pass(self, epoch: int) -> Iterator[StepRows]:
        g, rows = self.geometry, iter(self.stream)
        for rollout in itertools.count():
            batch = list(itertools.islice(rows, g.prompts_per_rollout))
            layout = EpochLayout(g, len(batch), self.drop_last)
            if not len(layout):
                return
            for inside in range(len(layout)):
                step = step_layout(g, rollout, inside, layout.trained_completions)
                request = self.rule.request(epoch, step)
                yield self.rule.rows(request, batch)


class StepLoader(DataLoader):
    """A `DataLoader` of `StepRows` that passes the epoch on; never sharded, since it is cut inside."""

    micro_batches: int | None = None  # the length of an evaluation for progress bars; None: the number of items

    def __len__(self) -> int:
        return super().__len__() if self.micro_batches is None else self.micro_batches

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        if isinstance(self.batch_sampler, EpochSteps):  # a stream counts its own passes
            self.batch_sampler.set_epoch(epoch)


_WORKERS = ("num_workers", "persistent_workers", "prefetch_factor")  # arguments of `DataLoader`


def make_loader(prompts: Any, rule: ProcessSlices, args: Any, shuffle: bool) -> StepLoader:
    """The training loader over a map-style data set or a stream of prompts.

    Args:
        prompts: `datasets.Dataset`, `datasets.IterableDataset` or anything indexable with a length.
        args: a `GRPOConfig` with its geometry; a stream is always read in this process.
    """
    geometry, seed, drop_last = args.geometry, args.seed, args.dataloader_drop_last
    if not hasattr(prompts, "__len__"):
        stream = prompts.shuffle(seed=seed) if shuffle and hasattr(prompts, "shuffle") else prompts
        steps = StepStream(stream, geometry, rule, drop_last)
        return StepLoader(steps, batch_size=None, collate_fn=lambda item: item, num_workers=0)
    layout = EpochLayout(geometry, len(prompts), drop_last)
    dataset = StepDataset(prompts, layout, rule, seed, shuffle, ahead=args.rollout_lag > 0)
    workers = {name: getattr(args, f"dataloader_{name}") for name in _WORKERS}
    return StepLoader(dataset, batch_sampler=EpochSteps(len(layout)), collate_fn=itemgetter(0), **workers)


def make_eval_loader(prompts: Any, rule: ProcessSlices, micro_batch: int) -> StepLoader:
    """The evaluation loader: one item, the whole set, so that metrics are means over it and not means of means.

    Its length is the micro-batches of `micro_batch` completions on one process.
    """
    rows = prompts if hasattr(prompts, "__len__") else list(prompts)
    layout = StepLayout(0, 0, 0, range(len(rows)), range(len(rows) * rule.num_generations))
    dataset = StepDataset(rows, [layout], rule)
    keys = [[0]] if len(rows) else []  # whatever the epoch: every evaluation samples by the same keys
    loader = StepLoader(dataset, batch_sampler=keys, collate_fn=itemgetter(0))
    loader.micro_batches = ceil_div(len(rows) * rule.num_generations, rule.num_processes * micro_batch)
    return loader
