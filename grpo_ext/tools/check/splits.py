"""`grpo-ext check`: trains a few steps under several hardware splits and reports of each, as it ends, whether it
learned the same. Stock TRL beside it (`against="trl"`) is the negative control."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ...batching.sizes import geometry_of
from ...errors import ConfigError
from ..stock import OURS, STOCK
from .comparison import GRADIENT_TOLERANCE, TOLERANCE, compare
from .report import CheckReport, Split, SplitResult
from .runs import Run, RunResult, train

Job = tuple[Run, Split]  # a run to train, and the split to train it under
Progress = Callable[[str], None]


def splits_of(global_batch_size: int, processes: Sequence[int], sizes: Sequence[int] | None = None) -> list[Split]:
    """Each micro-batch size on each number of processes.

    Without sizes: on the first number of processes the whole step in one forward, and a size that leaves a rest; on
    each further one two equal micro-batches on each process, where possible, which stock TRL can train too.
    """
    if sizes is not None:
        return [Split(size, n) for n in processes for size in sizes]
    uneven = next((s for s in range(max(3, global_batch_size // 8), global_batch_size) if global_batch_size % s), 1)
    first, *further = processes
    splits = [Split(global_batch_size, first), Split(uneven, first)]
    splits += [Split(max(1, global_batch_size // (2 * n)), n) for n in further]
    return list(dict.fromkeys(splits))


def _limited(run: Run, splits: Sequence[Split], steps: int, bitwise: bool) -> Run:
    """The run with so many steps; raises a ConfigError where its sizes do not fit a split."""
    config = {**run.config, "max_steps": steps, "logging_steps": 1}
    for split in splits:
        geometry_of({**config, "per_device_train_batch_size": split.micro_batch_size}, split.processes)
    return replace(run, trace=bitwise, config={**config, "bitwise_invariant": True} if bitwise else config)


def check(
    run: Run,
    splits: Sequence[Split],
    *,
    steps: int = 3,
    against: str | None = None,
    tolerance: float = TOLERANCE,
    bitwise: bool = False,
    progress: Progress = lambda sentence: None,
) -> CheckReport:
    """Train a few steps under every split and compare the updates with those of the first split.

    Unless `bitwise`, each split is trained a second time with a learning rate of 0: in float32 its gradients, not
    clipped, must agree too. A split beyond the tolerance is trained again in float64, with the reference: where the
    difference vanishes, it was rounding that the optimizer amplified (Adam moves an element whose gradient is rounding
    noise by a whole learning rate), and the verdict is "rounding". Runs in 16 bits or on quantised weights are not
    trained again: they would be other runs.

    Args:
        run: what is trained, with a `global_batch_size`; the micro-batch size in its settings is replaced.
        splits: the first one is the reference.
        steps: optimizer steps to train.
        against: "trl" runs stock TRL under the same splits.
        tolerance: the largest relative update error that counts as the same.
        bitwise: train with `bitwise_invariant=True` and compare hashes of every tensor after every step.
        progress: called with a sentence as each split ends, and before a repetition in float64.

    Raises:
        ConfigError: sizes that break a rule, or no split that could be trained. LaunchError: the processes died.
    """
    if against not in (None, STOCK):
        raise ConfigError(f"against={against!r} is unknown; use 'trl' or nothing.")
    run = _limited(run, splits, steps, bitwise)
    repeated = run.has_float64 and not bitwise
    again = "; float64 follows for those beyond the tolerance" if repeated else ""
    precision = run.half or "float32"
    progress(f"{len(splits)} splits in {precision}, written as processes x completions in a forward{again}")
    jobs = _jobs([run] if against is None else [run, replace(run, trainer=STOCK)], splits)
    with tempfile.TemporaryDirectory(prefix="grpo_ext_check_") as name:
        results = []
        for result in _results(jobs, Path(name), tolerance, gradients=not bitwise):
            open_question = repeated and result.verdict == "differs" and result.trainer == OURS
            progress(result.line("beyond the tolerance" if open_question else None))
            results.append(result)
        ours = [result for result in results if result.trainer == OURS]
        if all(result.verdict == "refused" for result in ours):
            raise ConfigError(f"no split could be trained: {ours[0].reason}")
        if repeated:
            _repeat(run, ours, Path(name), tolerance, progress)
    return CheckReport(sorted(results, key=lambda result: (OURS, STOCK).index(result.trainer)), steps)


def _jobs(runs: Sequence[Run], splits: Sequence[Split]) -> list[Job]:
    """Every run under every split; those on the same number of processes follow each other and share a launch."""
    counts = dict.fromkeys(split.processes for split in splits)
    return [(run, split) for count in counts for run in runs for split in splits if split.processes == count]


def _results(jobs: Sequence[Job], folder: Path, tolerance: float, gradients: bool) -> Iterator[SplitResult]:
    """Train all jobs and compare each with the first one of its trainer that could be trained.

    Args:
        folder: for the gradients.
    """
    references: dict[str, RunResult] = {}
    for (run, split), trained in _train(jobs, folder, gradients):
        if trained.error is None:
            references.setdefault(run.trainer, trained)
        reference = references.get(run.trainer, trained)
        yield compare(run, split, reference, trained, tolerance)
        if trained.gradients and trained is not reference:
            trained.gradients.unlink()


def _repeat(run: Run, results: Sequence[SplitResult], folder: Path, tolerance: float, progress: Progress) -> None:
    """Train the splits that differ, and the reference, again in float64; a difference that vanishes is rounding."""
    doubtful = [result for result in results if result.verdict == "differs"]
    reference = next((result for result in results if result.verdict == "reference"), None)
    if not doubtful or reference is None:
        return
    wrong = sum(result.gradient_error > GRADIENT_TOLERANCE for result in doubtful)
    progress(
        f"In float32 {len(doubtful)} split(s) are beyond the tolerance, {wrong} of them in the gradient; float64 tells "
        "whether that is rounding"
    )
    repeated = [reference, *doubtful]
    jobs = [(replace(run, dtype="float64"), result.split) for result in repeated]
    for result, exact in zip(repeated, _results(jobs, folder, tolerance, gradients=wrong > 0), strict=True):
        if result is not reference:
            result.float64_error = exact.update_error
            if exact.verdict == "same":
                result.verdict, result.reason = "rounding", ""
            progress(result.line())


def _train(jobs: Sequence[Job], folder: Path, gradients: bool) -> Iterator[tuple[Job, RunResult]]:
    """Train each job; with `gradients` also with a learning rate of 0, for the gradients in its result."""
    for processes, together in itertools.groupby(jobs, lambda job: job[1].processes):
        runs: list[Run] = []
        updates: dict[str, tuple[Job, Path]] = {}
        for number, (run, split) in enumerate(together):
            config = {**run.config, "per_device_train_batch_size": split.micro_batch_size}
            file = folder / f"{run.dtype}_{processes}_{number}.safetensors"
            if gradients:
                still = {**config, "learning_rate": 0.0, "max_grad_norm": 0.0}
                runs.append(replace(run, name=f"gradient_{number}", config=still, gradients=file))
            runs.append(replace(run, name=f"update_{number}", config=config))
            updates[runs[-1].name] = (run, split), file
        for result in train(runs, processes):
            if result.name in updates:
                job, file = updates[result.name]
                result.gradients = file if file.exists() else None
                yield job, result
