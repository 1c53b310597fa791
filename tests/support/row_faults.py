"""Planted faults of completions of several rows: what other trainers count by rows, as patches of this package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from grpo_ext.algorithms.losses import LossConfig, StepCounts, TokenBatch, TokenLoss
from grpo_ext.forward.columns import ADVANTAGES
from grpo_ext.forward.further_rows import FurtherRow
from grpo_ext.forward.rows import TokenRows
from grpo_ext.rollouts.batch import RolloutBatch
from grpo_ext.rollouts.local import LocalRollout
from grpo_ext.rollouts.source import Rollouts
from grpo_ext.rollouts.worker import RolloutWorker
from grpo_ext.step import loss, optimizer_step
from grpo_ext.step.cut_completion import CutCompletion


def _rows_of(batch: RolloutBatch) -> torch.Tensor:
    return torch.tensor([len(rows) for rows in batch.rows])


def row_baseline() -> Any:
    """A completion counts in its group's baseline as often as it has rows (miles 2378)."""
    having = RolloutBatch.having

    def planted(self: RolloutBatch, name: str, values: Any) -> RolloutBatch:
        if name == ADVANTAGES:
            groups = torch.tensor(self.groups)
            rows = _rows_of(self).to(values.dtype)
            sums, counts = (torch.zeros(int(groups.max()) + 1).index_add_(0, groups, v) for v in (rows * values, rows))
            values = values - (sums / counts)[groups]
        return having(self, name, values)

    return mock.patch.object(RolloutBatch, "having", planted)


@contextmanager
def _by_row(cfg_of: str) -> Iterator[None]:
    """`token_loss` or `token_weights` takes each row of a completion for a sequence."""
    columns, real, lengths = optimizer_step.loss_columns, getattr(loss, cfg_of), list[list[int]]()

    def noting(values: Any, rows: Any) -> Any:
        lengths[:] = [rows.scored_B]
        lengths.append([row.completion for row in rows.rows_of])
        return columns(values, rows)

    def planted(cfg: LossConfig, batch: TokenBatch, *more: Any) -> Any:
        of_rows, completions = torch.tensor(lengths[0]), torch.tensor(lengths[1])
        as_rows = replace(batch, lengths_B=of_rows, advantages=batch.advantages[completions])
        result = real(cfg, as_rows, *more)
        if isinstance(result, TokenLoss):
            return replace(result, ratio=batch.means(as_rows.spread(result.ratio), batch.mask_S))
        return result

    with mock.patch.object(optimizer_step, "loss_columns", noting), mock.patch.object(loss, cfg_of, planted):
        yield


def row_ratio() -> Any:
    """The ratio of a sequence is that of a row."""
    return _by_row("token_loss")


def row_mean() -> Any:
    """The mean of a sequence is that of a row (verl 7580)."""
    return _by_row("token_weights")


def trained_twice() -> Any:
    """A row trains the tokens of the row before it again."""
    run_turns = RolloutWorker.run_turns

    def planted(worker: RolloutWorker, local: LocalRollout) -> None:
        run_turns(worker, local)
        for t in local.real_transcripts:
            bounds = [0, *(row.start for row in t.further), len(t.ids)]
            places = [range(bounds[0], bounds[1])]
            places += [range(bounds[n - 1], bounds[n + 1]) for n in range(1, len(bounds) - 1)]
            starts = [sum(map(len, places[:n])) for n in range(1, len(places))]
            again = [place for part in places for place in part]
            firsts = [part.start for part in places[1:]]
            t.further = [FurtherRow(start, [*t.prompt_ids, *t.ids[:first]]) for start, first in zip(starts, firsts)]
            t.columns = {n: c[again] if len(c) == len(t.ids) else c for n, c in t.columns.items()}
            t.ids, t.mask = [t.ids[place] for place in again], [t.mask[place] for place in again]

    return mock.patch.object(RolloutWorker, "run_turns", planted)


def micro_batch_denominator() -> Any:
    """Tokens are counted in each micro-batch, and micro-batches averaged (trl 7206)."""
    real = loss.token_weights

    def planted(cfg: LossConfig, batch: TokenBatch, counts: StepCounts, groups: Any = ()) -> torch.Tensor:
        share = len(groups) / counts.completions
        return real(cfg, batch, replace(counts, tokens=float(batch.mask_S.sum()) / share), groups)

    return mock.patch.object(loss, "token_weights", planted)


def without_slopes() -> Any:
    """Each piece has its own token terms alone: the ratio of the sequence is fixed (rule 4 without D)."""
    derive = CutCompletion.derive

    def planted(self: CutCompletion, loss_of: Callable[..., torch.Tensor]) -> None:
        means = TokenBatch.means
        with mock.patch.object(TokenBatch, "means", lambda *args: means(*args).detach()):
            derive(self, loss_of)

    return mock.patch.object(CutCompletion, "derive", planted)


def steps_of_rows() -> Any:
    """A step ends once it has as many rows as completions were asked for (verl 7580)."""
    completions_of = Rollouts.completions_of

    def planted(self: Rollouts, rows: Any) -> RolloutBatch:
        step = completions_of(self, rows)
        taken = int((_rows_of(step).cumsum(0) <= len(step)).sum())
        return step.select(range(taken))

    return mock.patch.object(Rollouts, "completions_of", planted)


def contexts_routed() -> Any:
    """Routers count a context for each row that has it."""
    ones = property(lambda rows: torch.ones(len(rows.ids_N), dtype=torch.long))
    return mock.patch.object(TokenRows, "counted_N", ones)


FAULTS: dict[str, Callable[[], Any]] = {
    planted.__name__: planted
    for planted in (
        *(row_baseline, row_ratio, row_mean, trained_twice, micro_batch_denominator, without_slopes, steps_of_rows),
        contexts_routed,
    )
}
