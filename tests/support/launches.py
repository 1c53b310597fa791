"""Launches of the invariance tests: the splits they compare, the runs of a launch together, and one long run.

Log lines are compared here; `grpo-ext check` compares the records of runs.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_ext.run.record import read_record
from grpo_ext.run.rounding import relative
from grpo_ext.tools.check import runs
from grpo_ext.tools.check.runs import Run, RunResult, Starter
from tests.support.cases import Bench
from tests.support.forks import forked

# values that do not follow from the algorithm, or that depend on the split
_NOT_COMPARED = re.compile(r"step_time|total_flos|.*(_runtime|_per_second)|(time|layout)/.*")


@dataclass
class Trained(RunResult):
    log: list[dict[str, Any]] = field(default_factory=list)  # the Trainer's log lines; none of stock TRL


def train(jobs: Sequence[Run], processes: int, start: Starter = forked, **options: Any) -> Iterator[Trained]:
    """The results of `runs.train`, with the log lines of the runs' records."""
    for result in runs.train(jobs, processes, start=start, **options):
        entries = read_record(result.folder, trail=False).entries if result.folder else []
        log = [{"step": entry["step"], "epoch": entry["epoch"], **entry["values"]} for entry in entries]
        yield Trained(**vars(result), log=log)


def run_all(jobs: Sequence[Run], processes: int, **options: Any) -> list[Trained]:
    """The results of `train` in a list."""
    return list(train(jobs, processes, **options))


def metric_difference(reference: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[float, str]:
    """Largest relative difference (`relative`) over all logged values except timings, and its name."""
    if len(reference) != len(other):
        return math.inf, f"{len(reference)} against {len(other)} log lines"
    gaps = [
        (relative(a.get(key), b.get(key)), key)
        for a, b in zip(reference, other, strict=True)
        for key in a.keys() | b.keys()
        if not _NOT_COMPARED.fullmatch(key)
    ]
    return max([(0.0, ""), *gaps], key=lambda gap: gap[0])


def describe_difference(reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    """Name the parameter that differs most, with its largest and mean difference."""
    if reference.keys() != other.keys():
        return "the trained parameters differ"
    gaps = {name: (other[name].double() - d.double()).abs() for name, d in reference.items()}
    worst = max(gaps, key=lambda name: float(gaps[name].max()))
    return f"largest difference {float(gaps[worst].max()):.2e} (mean {float(gaps[worst].mean()):.2e}) in {worst}"


REFERENCE = 16  # the whole step in one forward
SIZES = (8, 5, 3, 1)


@dataclass
class Launches:
    """Runs are collected first and launched together, once per number of processes."""

    bench: Bench
    planned: dict[int, list[Run]] = field(default_factory=dict)
    done: dict[tuple[int, str], Trained] = field(default_factory=dict)

    def plan(self, processes: int, run: Run) -> None:
        if all(r.name != run.name for r in self.planned.setdefault(processes, [])):
            self.planned[processes].append(run)

    def result(self, processes: int, run: Run) -> Trained:
        self.plan(processes, run)
        if (processes, run.name) not in self.done:
            together = [r for r in self.planned[processes] if (processes, r.name) not in self.done]
            for r, outcome in zip(together, run_all(together, processes)):
                self.done[processes, r.name] = outcome
        return self.done[processes, run.name]


def another_seed(bench: Bench, name: str) -> Run:
    """The negative control of a case: its run in one process and one micro-batch, with another seed."""
    return bench.run(name, REFERENCE, name=f"other-{name}", seed=4)


SAVE = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 2}
# two epochs of rollouts of 8 prompts, the last one with what is left, in steps of 4, each rollout used twice
LONG = {"rollout_batch_size": 32, "num_iterations": 2, "num_train_epochs": 2, "max_steps": -1, "beta": 0.05, **SAVE}


def assert_same_run(one: Trained, other: Trained, step: int, steps: int) -> None:
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
