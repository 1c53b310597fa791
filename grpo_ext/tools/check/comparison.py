"""`grpo-ext check`: trains a few steps under several hardware splits and compares what was learned.

The relative update error of a split is `norm(dA - dB) / norm(dA)`, d the parameter change in float64, A the reference
split; the gradient error is the same for what the optimizer is given, in steps that all have the weights of the start
(a learning rate of 0), so that every split has the same completions. The invariance tests use the same code. Stock TRL
beside it (`against="trl"`) is the negative control.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from rich import box
from rich.table import Table
from safetensors import safe_open

from ...batching.sizes import EpochLayout, check_lag_of_run, geometry_of
from ...errors import ConfigError
from ..stock import OURS, STOCK
from .runs import Run, RunResult, run_all

TOLERANCE = 1e-5  # relative update error in float32, the promise of the default mode
METRIC_TOLERANCE = 1e-4  # |a - b| / max(1, |a|) of a logged value: logs are float32 sums in another order
GRADIENT_TOLERANCE = 1e-5  # relative, in float32, without an optimizer to amplify it
SMALL_STEP = 0.1  # of the largest step's gradient: rounding is measured against no less, a gradient may be nothing else
PADDING = 64  # `pad_to_multiple_of` of the stock run that differs in nothing else
IN_16_BITS = "16-bit rounding, or more: float32 would tell (docs/precision.md has what to expect)"
_GOOD = ("reference", "same", "same bits", "rounding")
_TIMING = ("step_time", "total_flos")  # values that are no result of the algorithm
_TIMING_ENDS = ("_runtime", "_per_second")
_LAYOUT_STARTS = ("time/", "layout/")  # say how a step was laid out, which is what a split changes


@dataclass(frozen=True)
class Split:
    """A hardware split: completions per forward on one device, and processes."""

    micro_batch_size: int
    processes: int = 1

    def __str__(self) -> str:
        return f"{self.processes} x {self.micro_batch_size}"


@dataclass
class SplitResult:
    """How a split compares with the reference split of the same trainer.

    Attributes:
        update_error: relative update error; NaN where there is none.
        gradient_error: the largest relative error of a step's gradient; NaN where there is none.
        metric_error: largest difference of a logged value, and its name.
        float64_error: the update error of the same split in float64, where that was needed to tell.
        verdict: "reference", "same", "same bits", "rounding", "differs", "nothing learned" or "refused".
        reason: what is to blame, where that can be known.
    """

    split: Split
    trainer: str
    update_error: float
    metric_error: float
    metric_name: str
    verdict: str
    reason: str = ""
    float64_error: float = math.nan
    gradient_error: float = math.nan


@dataclass
class CheckReport:
    """The comparison of all splits."""

    results: list[SplitResult]
    steps: int
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no split of this package's trainer differs or was refused."""
        return all(r.verdict in _GOOD for r in self.results if r.trainer == OURS)

    def of(self, trainer: str) -> list[SplitResult]:
        """The results of one trainer."""
        return [r for r in self.results if r.trainer == trainer]

    def table(self) -> Table:
        """The report for people."""
        title = f"Relative errors against the first split: the gradient, and the update after {self.steps} steps"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("trainer", "proc.", "micro", "gradient", "update", "float64", "logs", "verdict"):
            words = name in ("trainer", "verdict")
            table.add_column(name, justify="left" if words else "right", no_wrap=words)
        for r in self.results:
            values = (r.gradient_error, r.update_error, r.float64_error, r.metric_error)
            errors = ("" if math.isnan(e) else f"{e:.1e}" for e in values)
            table.add_row(r.trainer, str(r.split.processes), str(r.split.micro_batch_size), *errors, r.verdict)
        return table

    def notes(self) -> list[str]:
        """Why splits differ or were refused: one sentence for each reason, with the splits it holds for."""
        grouped: dict[tuple[str, str], list[str]] = {}
        for r in self.results:
            if r.reason:
                grouped.setdefault((r.trainer, r.reason), []).append(str(r.split))
        return [f"{trainer} at {', '.join(where)}: {reason}." for (trainer, reason), where in grouped.items()]

    def conclusion(self, bitwise: bool) -> str:
        """What the comparison shows, in a sentence or two."""
        if not self.ok:
            if any(r.verdict == "nothing learned" for r in self.results):
                return "Nothing was learned to compare."
            reasons = [r.reason for r in self.of(OURS) if r.verdict not in _GOOD]
            if all(reason == IN_16_BITS for reason in reasons):
                return "Splits differ, by 16-bit rounding or more."
            return "At least one split learns something else."
        rounding = (
            "rounding: beyond the tolerance in float32, within it in float64. Adam moves an element whose gradient is "
            "rounding noise by a whole learning rate; a larger adam_epsilon damps it.\n"
        )
        said = rounding if any(r.verdict == "rounding" for r in self.results) else ""
        return f"{said}Every split of grpo_ext learns the same{', to the bit' if bitwise else ''}."

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no NaN."""
        results = [dataclasses.asdict(r) for r in self.results]
        plain = [{n: None if isinstance(v, float) and math.isnan(v) else v for n, v in r.items()} for r in results]
        return {"ok": self.ok, "steps": self.steps, "results": plain}


def update_error(reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """`norm(dA - dB) / norm(dA)` over all parameters, in float64; 0 where neither moved, infinity where only B did."""
    if reference.keys() != other.keys():
        return math.inf
    difference = math.sqrt(sum(float((other[n].double() - d.double()).norm()) ** 2 for n, d in reference.items()))
    norm = math.sqrt(sum(float(d.double().norm()) ** 2 for d in reference.values()))
    return difference / norm if norm else (0.0 if difference == 0.0 else math.inf)


def gradient_error(reference: Path, other: Path) -> float:
    """The largest of all steps' `norm(gA - gB) / norm(gA)` over all parameters, in float64, from files of gradients.

    A step whose gradient is far smaller than the largest is measured against a share of that, `SMALL_STEP`.
    """
    squares: dict[str, list[float]] = {}
    with safe_open(reference, "pt") as file_a, safe_open(other, "pt") as file_b:
        if {*file_a.keys()} != {*file_b.keys()}:
            return math.inf
        for name in file_a.keys():  # noqa: SIM118 - no dictionary
            a, b = file_a.get_tensor(name).double(), file_b.get_tensor(name).double()
            step = squares.setdefault(name.split("/")[0], [0.0, 0.0])
            step[0] += float((a - b).norm()) ** 2
            step[1] += float(a.norm()) ** 2
    least = SMALL_STEP**2 * max((n for _, n in squares.values()), default=0.0)
    errors = [math.sqrt(d / max(n, least)) if max(n, least) else (math.inf if d else 0.0) for d, n in squares.values()]
    return max(errors, default=math.nan)


def describe_difference(reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    """Which parameter differs most, with the largest and the mean difference."""
    gaps = {name: (other[name].double() - d.double()).abs() for name, d in reference.items()}
    worst = max(gaps, key=lambda name: float(gaps[name].max()))
    return f"largest difference {float(gaps[worst].max()):.2e} (mean {float(gaps[worst].mean()):.2e}) in {worst}"


def metric_difference(reference: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[float, str]:
    """Largest `|a - b| / max(1, |a|)` over all logged values that are no timings, and its name."""
    if len(reference) != len(other):
        return math.inf, f"{len(reference)} against {len(other)} log lines"
    worst, name = 0.0, ""
    for line_a, line_b in zip(reference, other):
        for key in line_a.keys() | line_b.keys():
            if key in _TIMING or key.endswith(_TIMING_ENDS) or key.startswith(_LAYOUT_STARTS):
                continue
            gap = _gap(line_a.get(key), line_b.get(key))
            if gap > worst:
                worst, name = gap, key
    return worst, name


def _gap(a: Any, b: Any) -> float:
    if a == b:
        return 0.0
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return math.inf
    if math.isnan(a) and math.isnan(b):
        return 0.0
    return abs(a - b) / max(1.0, abs(a))


def compare(split: Split, trainer: str, reference: RunResult, other: RunResult, tolerance: float) -> SplitResult:
    """Compare two runs of one trainer."""
    if other.error is not None:
        return SplitResult(split, trainer, math.nan, math.nan, "", "refused", _first_line(other.error))
    error = update_error(reference.delta, other.delta)
    gap, name = metric_difference(reference.log, other.log)
    if not any(float(d.abs().max()) > 0 for d in other.delta.values()):
        nothing = "no parameter moved: no group had rewards that differ, or the learning rate is 0; train more steps"
        return SplitResult(split, trainer, error, gap, name, "nothing learned", nothing)
    if other is reference:
        return SplitResult(split, trainer, 0.0, 0.0, "", "reference")
    same = error <= tolerance and gap <= METRIC_TOLERANCE
    return SplitResult(split, trainer, error, gap, name, "same" if same else "differs")


def first_difference(reference: list[dict[str, str]], other: list[dict[str, str]]) -> tuple[int, str] | None:
    """The first step and tensor whose hashes differ; None where all are the same."""
    for step, (a, b) in enumerate(zip(reference, other), start=1):
        different = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        if different:
            return step, different[0]
    return None if len(reference) == len(other) else (min(len(reference), len(other)) + 1, "the number of steps")


def compare_bits(split: Split, trainer: str, reference: RunResult, other: RunResult) -> SplitResult:
    """Compare two runs of one trainer by the hashes of every parameter and optimizer tensor after every step."""
    result = compare(split, trainer, reference, other, math.inf)
    if result.verdict not in ("same", "differs"):
        return result
    found = first_difference(reference.trace, other.trace)
    if found is not None:
        result.verdict, result.reason = "differs", f"the first difference is in {found[1]} after step {found[0]}"
    elif result.metric_error > 0.0:
        result.verdict, result.reason = "differs", f"only the log differs, most in {result.metric_name}"
    else:
        result.verdict = "same bits"
    return result


def _first_line(error: str) -> str:
    return error.removeprefix("GrpoExtError: ").split("\n")[0][:200]


def blame(result: SplitResult, config: dict[str, Any], reference: RunResult, other: RunResult, in_16_bits: bool) -> str:
    """What makes a split differ, where the settings or the first log line tell."""
    if reference.log and other.log and result.trainer == STOCK:
        sampled = ("completions/mean_length", "reward", "num_tokens")
        if any(_gap(reference.log[0].get(k), other.log[0].get(k)) > 1e-6 for k in sampled):
            return "the first rollout differs (each process samples with a seed of its own)"
    reasons = []
    if config.get("allow_split_dependent"):
        reasons.append("allow_split_dependent=True: dropout or batch statistics depend on the micro-batch")
    if in_16_bits:
        reasons.append(IN_16_BITS)
    if result.trainer == STOCK:
        if config.get("loss_type") == "bnpo":
            reasons.append("loss_type=bnpo averages means of micro-batches")
        if config.get("top_entropy_quantile", 1.0) < 1.0:
            reasons.append("top_entropy_quantile is taken per micro-batch")
        if config.get("entropy_coef") or config.get("use_adaptive_entropy"):
            reasons.append("the entropy bonus averages means of micro-batches")
        if config.get("rollout_batch_size", 0) and result.split.processes > 1:
            reasons.append("the rollout batch is shuffled per process")
    return "; ".join(reasons)


def default_splits(global_batch_size: int, processes: Sequence[int]) -> list[Split]:
    """Micro-batches of the whole step, halves, and sizes that divide nothing, on each number of processes."""
    sizes = [global_batch_size, global_batch_size // 2, 5, 3, 1]
    kept = sorted({s for s in sizes if 1 <= s <= global_batch_size}, reverse=True)
    return [Split(size, n) for n in processes for size in kept]


def check(
    model: Any,
    train_dataset: Any,
    reward_funcs: Any,
    config: dict[str, Any],
    *,
    processing_class: Any = None,
    splits: Iterable[Split] | None = None,
    steps: int = 3,
    against: str | None = None,
    peft: PeftConfig | None = None,
    quantization: Any = None,
    tolerance: float = TOLERANCE,
    bitwise: bool = False,
    progress: Any = None,
) -> CheckReport:
    """Train a few steps under every split and compare the updates with those of the first split.

    Beside each, unless `bitwise`, runs one with a learning rate of 0: in float32 its gradients, not clipped, must agree
    too. A split beyond the tolerance of the update alone is trained again in float64, with the reference: where the
    difference vanishes, it was rounding that the optimizer amplified (Adam moves an element whose gradient is rounding
    noise by a whole learning rate), and the verdict is "rounding". Runs in 16 bits or on quantised weights are not
    trained again: they would be other runs.

    Args:
        model: folder or id of a model with its tokenizer, or a model object.
        train_dataset: a `datasets.Dataset` with a `prompt` column.
        reward_funcs: one reward function or several.
        config: keyword arguments of `GRPOConfig`; sizes of the split in it are replaced by the splits'.
        processing_class: the tokenizer, for a model object.
        splits: default: several micro-batch sizes on 1 and 2 processes.
        against: "trl" runs stock TRL beside, under the same splits.
        steps: optimizer steps to train.
        peft: the adapter; None for full training.
        quantization: a `transformers.BitsAndBytesConfig`.
        tolerance: the largest relative update error that counts as the same.
        bitwise: train with `bitwise_invariant=True` and compare hashes of every tensor after every step.
        progress: called with a sentence before each launch.

    Returns:
        A `CheckReport`; `report.ok` is false when a split differs.

    Raises:
        ConfigError: sizes that break a rule, or no split that could be trained. LaunchError: the processes died.
    """
    if against not in (None, STOCK):
        raise ConfigError(f"against={against!r} is unknown; use 'trl' or nothing.")
    base = _settings(config, steps, bitwise)
    chosen = list(splits) if splits is not None else default_splits(base["global_batch_size"], (1, 2))
    if not chosen:
        raise ConfigError("no splits to compare; give at least one micro-batch size and one number of processes.")
    for split in chosen:
        geometry = geometry_of({**base, "per_device_train_batch_size": split.micro_batch_size}, split.processes)
        layout = EpochLayout(geometry, len(train_dataset), base.get("dataloader_drop_last", False))
        check_lag_of_run(base.get("rollout_lag", 0), layout, steps)
    functions = tuple(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else (reward_funcs,)
    with tempfile.TemporaryDirectory(prefix="grpo_ext_check_") as name:
        data_path = str(Path(name) / "data")
        train_dataset.save_to_disk(data_path)
        start = _model_folder(model, processing_class, Path(name))
        template = Run("", start, data_path, functions, base, peft=peft, quantization=quantization, trace=bitwise)
        results: list[SplitResult] = []
        for trainer in (OURS, STOCK) if against else (OURS,):
            results += _compare_trainer(
                dataclasses.replace(template, trainer=trainer), chosen, tolerance, progress, Path(name) / trainer
            )
            if all(r.verdict == "refused" for r in results):
                raise ConfigError(f"no split could be trained: {results[0].reason}")
        return CheckReport(results, steps, base)


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


def _model_folder(model: Any, processing_class: Any, folder: Path) -> str:
    if isinstance(model, (str, Path)):
        return str(model)
    if processing_class is None:
        raise ConfigError("a model object needs its tokenizer; pass processing_class.")
    model.save_pretrained(folder / "model")
    processing_class.save_pretrained(folder / "model")
    return str(folder / "model")


def _launch(
    template: Run, splits: Sequence[Split], dtype: str, progress: Any, gradients: Path | None = None
) -> dict[Split, RunResult]:
    """The run of every split; with a folder for gradients, also a run that does not learn, for those."""
    results: dict[Split, RunResult] = {}
    for processes in dict.fromkeys(s.processes for s in splits):
        here = [s for s in splits if s.processes == processes]
        runs = [
            dataclasses.replace(
                template,
                name=f"micro_{s.micro_batch_size}",
                dtype=dtype,
                config={**template.config, "per_device_train_batch_size": s.micro_batch_size},
            )
            for s in here
        ]
        if gradients is not None:
            runs += [
                dataclasses.replace(
                    run,
                    name=f"gradient_{run.name}",
                    config={**run.config, "learning_rate": 0.0, "max_grad_norm": 0.0},
                    gradients=_gradient_file(gradients, s),
                )
                for run, s in zip(runs, here)
            ]
        if progress is not None:
            sizes = ", ".join(str(s.micro_batch_size) for s in here)
            progress(f"{template.trainer}, {template.half or dtype}: {processes} process(es), micro-batches of {sizes}")
        results |= dict(zip(here, run_all(runs, processes)))
    return results


def _gradient_file(folder: Path, split: Split) -> Path:
    return folder / f"{split.processes}x{split.micro_batch_size}.safetensors"


def _compare_trainer(
    template: Run, splits: list[Split], tolerance: float, progress: Any, folder: Path
) -> list[SplitResult]:
    folder.mkdir()
    in_float32 = template.in_float32
    runs = _launch(template, splits, "float32", progress, None if template.trace else folder)
    reference_split = next((s for s in splits if runs[s].error is None), splits[0])
    reference = runs[reference_split]
    if template.trace:
        return [compare_bits(s, template.trainer, reference, runs[s]) for s in splits]
    compared = [compare(s, template.trainer, reference, runs[s], tolerance) for s in splits]
    wrong: set[Split] = set()  # whose gradient differs, whatever the optimizer makes of it
    for result in compared:
        if (file := _gradient_file(folder, result.split)).exists():
            result.gradient_error = gradient_error(_gradient_file(folder, reference_split), file)
        if in_float32 and result.verdict in ("same", "differs") and result.gradient_error > GRADIENT_TOLERANCE:
            result.verdict = "differs"
            wrong.add(result.split)
    doubtful = [r for r in compared if r.verdict == "differs"]
    exact: dict[Split, RunResult] = {}
    again_folder = folder / "float64"
    if doubtful and template.trainer == OURS and in_float32 and template.quantization is None:
        again_folder.mkdir()
        again = [reference_split, *(r.split for r in doubtful)]
        exact = _launch(template, again, "float64", progress, again_folder if wrong else None)
    for result in doubtful:
        if result.split in exact:
            repeated = compare(result.split, OURS, exact[reference_split], exact[result.split], tolerance)
            result.float64_error = repeated.update_error
            files = [_gradient_file(again_folder, split) for split in (reference_split, result.split)]
            if repeated.verdict == "same" and not (wrong and gradient_error(*files) > GRADIENT_TOLERANCE):
                result.verdict = "rounding"
                continue
        result.reason = blame(result, template.config, reference, runs[result.split], not in_float32)
        if not result.reason and result.update_error <= tolerance:
            only_log = f"only the log differs, most in {result.metric_name}"
            result.reason = "the gradient differs, the update hides it" if result.split in wrong else only_log
        if not result.reason and reference.delta.keys() == runs[result.split].delta.keys():
            result.reason = describe_difference(reference.delta, runs[result.split].delta)
    if template.trainer == STOCK and reference.error is None:
        compared.append(_other_padding(template, reference_split, reference, tolerance, progress, folder))
    return compared


def _other_padding(
    template: Run, split: Split, reference: RunResult, tolerance: float, progress: Any, folder: Path
) -> SplitResult:
    """The reference run of stock TRL again, with nothing but more padding: what rounding alone does."""
    padded = dataclasses.replace(template, config={**template.config, "pad_to_multiple_of": PADDING})
    (folder / "padded").mkdir()
    found = _launch(padded, [split], "float32", progress, folder / "padded")[split]
    result = compare(split, f"{STOCK}, padded", reference, found, tolerance)
    if found.error is None:
        files = [_gradient_file(folder, split), _gradient_file(folder / "padded", split)]
        result.gradient_error = gradient_error(*files)
        result.reason = f"pad_to_multiple_of={PADDING} and nothing else: what rounding alone does"
    return result
