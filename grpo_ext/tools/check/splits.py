"""`grpo-ext check`: trains a few steps under several hardware splits, one after the other, and says of each as it comes
whether it learned the same. Stock TRL beside it (`against="trl"`) is the negative control."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...batching.sizes import geometry_of
from ...errors import ConfigError
from ..stock import OURS, STOCK
from .comparison import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    blame,
    compare,
    compare_bits,
    describe_difference,
    gradient_error,
)
from .report import CheckReport, Split, SplitResult
from .runs import Launch, Run, RunResult, is_local, launch
from .task import Task

PADDING = 64  # `pad_to_multiple_of` of the stock run that differs in nothing else
_FLOAT64_COST = 2.0  # seconds of a run in float64 over float32, at the least: numbers of twice the size

# a sentence, and the seconds that are left where they are known
Progress = Callable[[str, float | None], None]


def splits_of(global_batch_size: int, processes: Sequence[int], sizes: Sequence[int] | None) -> list[Split]:
    """Each micro-batch size on each number of processes; the default splits where no sizes are named."""
    if sizes is None:
        return default_splits(global_batch_size, processes)
    return [Split(size, n) for n in processes for size in sizes]


def default_splits(global_batch_size: int, processes: Sequence[int]) -> list[Split]:
    """On the first number of processes the whole step in one forward, and a size that leaves a rest; on each further
    one two equal micro-batches on each process, where that can be, which stock TRL can train too."""
    uneven = next((s for s in range(max(3, global_batch_size // 8), global_batch_size) if global_batch_size % s), 1)
    first, *further = processes
    splits = [Split(global_batch_size, first), Split(uneven, first)]
    splits += [Split(max(1, global_batch_size // (2 * n)), n) for n in further]
    return list(dict.fromkeys(splits))


def check(
    task: Task,
    *,
    splits: Iterable[Split] | None = None,
    steps: int = 3,
    against: str | None = None,
    tolerance: float = TOLERANCE,
    bitwise: bool = False,
    progress: Progress = lambda sentence, seconds_left: None,
) -> CheckReport:
    """Train a few steps under every split and compare the updates with those of the first split.

    Beside each, unless `bitwise`, runs one with a learning rate of 0: in float32 its gradients, not clipped, must agree
    too. Once all are trained, a split beyond the tolerance is trained again in float64, with the reference: where the
    difference vanishes, it was rounding that the optimizer amplified (Adam moves an element whose gradient is rounding
    noise by a whole learning rate), and the verdict is "rounding". Runs in 16 bits or on quantised weights are not
    trained again: they would be other runs.

    Args:
        task: sizes of a split among its settings are replaced by the splits'.
        splits: default: two micro-batch sizes on one process, one on two.
        steps: optimizer steps to train.
        against: "trl" runs stock TRL beside, under the same splits.
        tolerance: the largest relative update error that counts as the same.
        bitwise: train with `bitwise_invariant=True` and compare hashes of every tensor after every step.
        progress: called with a sentence and the seconds that are left, as measured so far (None where nothing is
            yet): as each split is trained, and before a repetition in float64.

    Raises:
        ConfigError: sizes that break a rule, or no split that could be trained. LaunchError: the processes died.
    """
    if against not in (None, STOCK):
        raise ConfigError(f"against={against!r} is unknown; use 'trl' or nothing.")
    settings = _settings(task.settings, steps, bitwise)
    chosen = list(splits) if splits is not None else default_splits(settings["global_batch_size"], (1, 2))
    _check_sizes(settings, chosen)
    with tempfile.TemporaryDirectory(prefix="grpo_ext_check_") as name, ExitStack() as stack:
        data_path = str(Path(name) / "data")
        task.dataset.save_to_disk(data_path)
        rewards = tuple(task.rewards)
        ours = Run("", task.model, data_path, rewards, settings, OURS, task.peft, task.quantization, trace=bitwise)
        trial = _Trial(Path(name), _Launches(stack, is_local([ours])), tolerance, progress)
        repeated = not bitwise and ours.has_float64
        again = "; float64 follows for those beyond the tolerance" if repeated else ""
        precision = ours.half or "float32"
        progress(f"{len(chosen)} splits in {precision}, written as processes x completions in a forward{again}", None)
        results = trial.compare(ours, chosen, later=(len(chosen) + 1) if against else 0)
        if against:
            results += trial.compare(dataclasses.replace(ours, trainer=STOCK), chosen, later=1)
        return CheckReport(results, steps)


def _check_sizes(settings: Mapping[str, Any], splits: Sequence[Split]) -> None:
    """Refuse sizes that break a rule under one of the splits, before anything is started."""
    if not splits:
        raise ConfigError("no splits to compare; give at least one micro-batch size and one number of processes.")
    for split in splits:
        geometry_of({**settings, "per_device_train_batch_size": split.micro_batch_size}, split.processes)


def _settings(config: Mapping[str, Any], steps: int, bitwise: bool) -> dict[str, Any]:
    """The settings that all splits share: without sizes of a split, and without evaluation."""
    of_a_split = ("per_device_train_batch_size", "gradient_accumulation_steps", "eval_strategy", "eval_steps")
    shared = {name: value for name, value in config.items() if name not in of_a_split}
    if shared.get("global_batch_size") is None:
        raise ConfigError(
            "global_batch_size is not set; a check compares splits of one global batch, so it has to be given, for "
            "example global_batch_size=16."
        )
    return {**shared, "max_steps": steps, "logging_steps": 1, **({"bitwise_invariant": True} if bitwise else {})}


class _Launches:
    """One launch for each number of processes, which stays for what comes later; and the seconds that they take."""

    def __init__(self, stack: ExitStack, offline: bool) -> None:
        self._stack, self._offline = stack, offline
        self._open: dict[int, Launch] = {}
        self._starts: list[float] = []  # seconds
        self._runs: dict[str, list[float]] = {"float32": [], "float64": []}  # seconds of one run

    def train(self, runs: Sequence[Run], processes: int) -> list[RunResult]:
        """The results of runs on this number of processes."""
        begin = time.perf_counter()
        if processes not in self._open:
            self._open[processes] = self._stack.enter_context(launch(processes, self._offline))
            self._open[processes].wait_until_ready()
            self._starts.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        results = list(self._open[processes].train(runs))
        self._runs[runs[0].dtype].append((time.perf_counter() - begin) / len(runs))
        return results

    def seconds(self, runs: int, dtype: str = "float32", processes: Iterable[int] = ()) -> float | None:
        """What so many runs will take, with the start of launches, as those before them did; None for no run."""
        each = self._runs[dtype] or [_FLOAT64_COST * seconds for seconds in self._runs["float32"]]
        starts = len({*processes} - self._open.keys()) * statistics.fmean(self._starts)
        return runs * statistics.fmean(each) + starts if runs else None


@dataclass
class _Learned:
    """What a split learned: its run, and the file with the gradients of a run that does not learn."""

    run: RunResult
    gradients: Path | None


@dataclass
class _Trial:
    """What all splits of a check share."""

    folder: Path
    launches: _Launches
    tolerance: float
    progress: Progress
    _files: Any = field(default_factory=itertools.count)

    def train(self, run: Run, split: Split, gradients: bool) -> _Learned:
        """Train a split; with `gradients` also without learning, for those."""
        config = {**run.config, "per_device_train_batch_size": split.micro_batch_size}
        runs, file = [dataclasses.replace(run, name="update", config=config)], None
        if gradients:
            file = self.folder / f"gradients_{next(self._files)}.safetensors"
            still = {**config, "learning_rate": 0.0, "max_grad_norm": 0.0}
            runs.append(dataclasses.replace(run, name="gradient", config=still, gradients=file))
        learned = self.launches.train(runs, split.processes)[0]
        return _Learned(learned, file if file is not None and file.exists() else None)

    def compare(self, run: Run, splits: Sequence[Split], later: int) -> list[SplitResult]:
        """Train and compare every split of one trainer; `later` splits of another one come after them.

        Raises:
            ConfigError: no split could be trained.
        """
        results: list[SplitResult] = []
        reference: tuple[Split, _Learned] | None = None
        repeated = run.trainer == OURS and not run.trace and run.has_float64
        for number, split in enumerate(splits, start=1):
            learned = self.train(run, split, gradients=not run.trace)
            if reference is None and learned.run.error is None:
                reference = split, learned
            results.append(self._compared(run, split, reference[1] if reference else learned, learned))
            rest = splits[number:]
            runs = (len(rest) + later) * (1 if run.trace else 2)
            left = self.launches.seconds(runs, processes={s.processes for s in rest})
            open_question = repeated and results[-1].verdict == "differs"
            self.progress(results[-1].line("beyond the tolerance" if open_question else None), left)
        if reference is None:
            raise ConfigError(f"no split could be trained: {results[0].reason}")
        doubtful = [r for r in results if r.verdict == "differs"]
        if doubtful and repeated:
            self._repeat(run, reference[0], doubtful)
        if run.trainer == STOCK and not run.trace:
            results.append(self._other_padding(run, *reference))
        return results

    def _compared(self, run: Run, split: Split, reference: _Learned, learned: _Learned) -> SplitResult:
        if run.trace:
            return compare_bits(split, run.trainer, reference.run, learned.run)
        result = compare(split, run.trainer, reference.run, learned.run, self.tolerance)
        if reference.gradients and learned.gradients:
            result.gradient_error = gradient_error(reference.gradients, learned.gradients)
            if learned is not reference:
                learned.gradients.unlink()
        wrong = run.in_float32 and result.gradient_error > GRADIENT_TOLERANCE
        if result.verdict == "same" and wrong:
            result.verdict = "differs"
        if result.verdict != "differs":
            return result
        result.reason = blame(result, run.config, reference.run, learned.run, not run.in_float32)
        if not result.reason and result.update_error <= self.tolerance:
            only_log = f"only the log differs, most in {result.metric_name}"
            result.reason = "the gradient differs, the update hides it" if wrong else only_log
        if not result.reason and reference.run.delta.keys() == learned.run.delta.keys():
            result.reason = describe_difference(reference.run.delta, learned.run.delta)
        return result

    def _repeat(self, run: Run, split: Split, doubtful: Sequence[SplitResult]) -> None:
        """Train the doubtful splits and the reference `split` again in float64: what vanishes there was rounding."""
        wrong = [r for r in doubtful if r.gradient_error > GRADIENT_TOLERANCE]
        each = 2 if wrong else 1
        self.progress(
            f"In float32 {len(doubtful)} split(s) are beyond the tolerance, {len(wrong)} of them in the gradient; "
            "float64 tells whether that is rounding",
            self.launches.seconds(each * (len(doubtful) + 1), "float64"),
        )
        exact = dataclasses.replace(run, dtype="float64")
        reference = self.train(exact, split, gradients=bool(wrong))
        for number, result in enumerate(doubtful, start=1):
            learned = self.train(exact, result.split, gradients=bool(wrong))
            again = compare(result.split, run.trainer, reference.run, learned.run, self.tolerance)
            result.float64_error = again.update_error
            off = 0.0
            if reference.gradients and learned.gradients:
                off = gradient_error(reference.gradients, learned.gradients)
            if again.verdict == "same" and off <= GRADIENT_TOLERANCE:
                result.verdict, result.reason = "rounding", ""
            self.progress(result.line(), self.launches.seconds(each * (len(doubtful) - number), "float64"))

    def _other_padding(self, run: Run, split: Split, reference: _Learned) -> SplitResult:
        """The reference run of stock TRL again, with nothing but more padding: what rounding alone does."""
        padded = dataclasses.replace(run, config={**run.config, "pad_to_multiple_of": PADDING})
        learned = self.train(padded, split, gradients=True)
        result = compare(split, f"{STOCK}, padded", reference.run, learned.run, self.tolerance)
        if reference.gradients and learned.gradients:
            result.gradient_error = gradient_error(reference.gradients, learned.gradients)
            result.reason = f"pad_to_multiple_of={PADDING} and nothing else: what rounding alone does"
        self.progress(result.line(), None)
        return result
