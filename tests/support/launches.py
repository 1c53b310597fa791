"""Launches of the invariance tests: the splits they compare, the runs of a launch together, and one long run."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_ext.tools.check import runs
from grpo_ext.tools.check.comparison import metric_difference
from grpo_ext.tools.check.runs import Run, RunResult
from tests.support.cases import Bench
from tests.support.forks import forked

train = functools.partial(runs.train, start=forked)


def run_all(runs: Sequence[Run], processes: int, **options: Any) -> list[RunResult]:
    """The results of `train` in a list."""
    return list(train(runs, processes, **options))


REFERENCE = 16  # the whole step in one forward
SIZES = (8, 5, 3, 1)


@dataclass
class Launches:
    """Runs are collected first and launched together, once per number of processes."""

    bench: Bench
    planned: dict[int, list[Run]] = field(default_factory=dict)
    done: dict[tuple[int, str], RunResult] = field(default_factory=dict)

    def plan(self, processes: int, run: Run) -> None:
        if all(r.name != run.name for r in self.planned.setdefault(processes, [])):
            self.planned[processes].append(run)

    def result(self, processes: int, run: Run) -> RunResult:
        self.plan(processes, run)
        if (processes, run.name) not in self.done:
            together = [r for r in self.planned[processes] if (processes, r.name) not in self.done]
            for r, outcome in zip(together, run_all(together, processes)):
                self.done[processes, r.name] = outcome
        return self.done[processes, run.name]


SAVE = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 2}
# two epochs of 22 prompts in rollouts of 8, 8 and 6 prompts, steps of 4 (the last one of 2), each rollout used twice
LONG = {"rollout_batch_size": 32, "num_iterations": 2, "num_train_epochs": 2, "max_steps": -1, "beta": 0.05, **SAVE}
STEPS = 24


def assert_same_run(one: RunResult, other: RunResult, step: int = 0, steps: int = STEPS) -> None:
    """Assert that a run of `steps` steps and one that went on after `step` have the same bits and log lines."""
    assert one.error is None, one.error
    assert other.error is None, other.error
    assert len(one.trace) == steps
    assert other.trace == one.trace[step:]
    lines, later = ([line for line in run.log if line["step"] > step] for run in (one, other))
    assert metric_difference(lines, later) == (0.0, "")


def long_run(bench: Bench, folder: Path, name: str, size: int = 16, **changes: Any) -> Run:
    settings = {**LONG, "output_dir": str(folder / name), "loss_type": "grpo", **changes}
    return bench.run("grpo", size, name=name, trace=True, **settings)
