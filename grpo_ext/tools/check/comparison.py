"""How two runs of a check differ: what they learned, their gradients, their logs, their bits.

The relative update error is `norm(dA - dB) / norm(dA)`, d the parameter change in float64, A the reference; the
gradient error is the same for what the optimizer is given, in steps that all have the weights of the start (a learning
rate of 0), so that every split has the same completions. The invariance tests use the same code.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..stock import STOCK
from .report import IN_16_BITS, Split, SplitResult
from .runs import RunResult

TOLERANCE = 1e-5  # relative update error in float32, the promise of the default mode
METRIC_TOLERANCE = 1e-4  # |a - b| / max(1, |a|) of a logged value: logs are float32 sums in another order
GRADIENT_TOLERANCE = 1e-5  # relative, in float32, without an optimizer to amplify it
SMALL_STEP = 0.1  # of the largest step's gradient: rounding is measured against no less, a gradient may be nothing else
_TIMING = ("step_time", "total_flos")  # values that are no result of the algorithm
_TIMING_ENDS = ("_runtime", "_per_second")
_LAYOUT_STARTS = ("time/", "layout/")  # say how a step was laid out, which is what a split changes


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
    if (difference := first_difference(reference.trace, other.trace)) is not None:
        step, tensor = difference
        result.verdict, result.reason = "differs", f"the first difference is in {tensor} after step {step}"
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
