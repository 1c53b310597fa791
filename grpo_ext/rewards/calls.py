"""Records of what reward functions log with `log_metric` and `log_extra`, one for each call.

Differs from TRL, which calls a function with the rows of a process: a call holds the same completions for every number
of processes, so its metrics and columns are the same too. rewards.guard fills the records, `join` gathers them, and
rollouts.records adds them to TRL's.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate.logging import get_logger

logger = get_logger(__name__)


@dataclass
class RewardCall:
    """One call of a reward function, with what it logged.

    Attributes:
        function: its name.
        number: its place among the reward functions.
        first: place of the call's first completion in the rollout batch, over all processes.
        rows: completions of the call.
        metrics: names and values, in the order logged.
        columns: values by column, at best one for each completion of the call.
    """

    function: str
    number: int
    first: int
    rows: int
    metrics: list[tuple[str, float]] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def moved(self, places: int) -> RewardCall:
        """The same call, with its completions moved by `places` in the rollout batch."""
        return replace(self, first=self.first + places)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; the metric is the mean over all calls that logged it."""
        self.metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a column of the completions table, one value for each completion of the call."""
        self.columns.setdefault(column, []).extend(values)


def metrics_of(calls: Sequence[RewardCall]) -> dict[str, list[float]]:
    """The values of each metric, one for each time it was logged."""
    values: dict[str, list[float]] = {}
    for call in calls:
        for name, value in call.metrics:
            values.setdefault(name, []).append(value)
    return dict(sorted(values.items()))


def columns_of(calls: Sequence[RewardCall], rows: int) -> dict[str, list[Any]]:
    """Columns of the completions table with one entry for each of `rows` completions, None where none was logged.

    Where several functions log the same column, the last one counts.
    """
    table: dict[str, list[Any]] = {}
    for call in calls:
        for column, values in call.columns.items():
            if len(values) != call.rows:
                logger.warning_once(
                    f"reward function '{call.function}' logged {len(values)} value(s) in the column '{column}' for "
                    f"{call.rows} completions; log one for each. Missing values are None, surplus ones are left out."
                )
            values = values[: call.rows]
            table.setdefault(column, [None] * rows)[call.first : call.first + len(values)] = values
    return dict(sorted(table.items()))


def add_columns(table: MutableMapping[str, Any], columns: dict[str, list[Any]], rows: int, length: int) -> None:
    """Add the columns of a rollout batch to TRL's record, so that every column stays as long as the prompts'.

    Args:
        table: TRL's record, bounded like that of the prompts.
        columns: of this rollout batch.
        rows: completions of this rollout batch.
        length: entries in the record of the prompts, those of this rollout batch included.
    """
    for column in [*table, *(name for name in columns if name not in table)]:
        entries = table[column]
        new = list(columns.get(column, ()))
        entries.extend(new + [None] * (rows - len(new)))
        entries.extendleft([None] * (length - len(entries)))
