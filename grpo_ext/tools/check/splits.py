"""`grpo-ext check`: trains a few steps under several hardware splits and reports whether each learned the same.

Stock TRL under the same splits (`against="trl"`) is the negative control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...batching.sizes import geometry_of
from ...errors import ConfigError
from ..stock import OURS, STOCK
from .comparison import TOLERANCE, CheckReport, Split, SplitResult, compare
from .runs import Run, RunResult, train


def splits_of(global_batch_size: int, processes: Sequence[int], sizes: Sequence[int] | None = None) -> list[Split]:
    """List each micro-batch size on each number of processes.

    Without sizes: on the first number of processes, the whole step in one forward, and a size that leaves a remainder;
    on each other number, two equal micro-batches per process if possible, which stock TRL can train too.
    """
    if sizes is not None:
        return [Split(size, n) for n in processes for size in sizes]
    uneven = next((s for s in range(max(3, global_batch_size // 8), global_batch_size) if global_batch_size % s), 1)
    first, *further = processes
    splits = [Split(global_batch_size, first), Split(uneven, first)]
    splits += [Split(max(1, global_batch_size // (2 * n)), n) for n in further]
    return list(dict.fromkeys(splits))


def check(
    run: Run,
    splits: Sequence[Split],
    *,
    steps: int = 3,
    against: str | None = None,
    tolerance: float = TOLERANCE,
    bitwise: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Train a few steps of a run, which has a `global_batch_size`, under every split; compare with the first split.

    `bitwise` trains with `bitwise_invariant=True` and compares hashes of every tensor after every step.
    """
    if against not in (None, STOCK):
        raise ConfigError(f"against={against!r} is unknown; use 'trl' or nothing.")
    config = {**run.config, "max_steps": steps, "logging_steps": 1}
    if bitwise:
        config["bitwise_invariant"] = True
    for split in splits:
        geometry_of({**config, "per_device_train_batch_size": split.micro_batch_size}, split.processes)
    progress(f"{len(splits)} splits in {run.half or 'float32'}, written as processes x completions in a forward")
    results: list[SplitResult] = []
    references: dict[str, RunResult] = {}
    for processes in dict.fromkeys(split.processes for split in splits):  # they share a launch
        jobs: list[tuple[Run, Split]] = []
        for trainer in (OURS, STOCK) if against else (OURS,):
            for split in (split for split in splits if split.processes == processes):
                settings = {**config, "per_device_train_batch_size": split.micro_batch_size}
                job = replace(run, name=str(len(jobs)), trainer=trainer, config=settings)
                jobs.append((replace(job, trace=bitwise, gradients=not bitwise), split))
        for trained, (job, split) in zip(train([job for job, _ in jobs], processes), jobs, strict=True):
            if trained.error is None:
                references.setdefault(job.trainer, trained)
            results.append(compare(job, split, references.get(job.trainer, trained), trained, tolerance))
            progress(str(results[-1]))
    report = CheckReport(results, steps)
    if all(result.verdict == "refused" for result in report.of(OURS)):
        raise ConfigError(f"no split could be trained: {report.of(OURS)[0].reason}")
    return report
