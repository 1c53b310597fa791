"""How two runs of a check differ: their updates, gradients, logs and bits.

The relative update error is `norm(dA - dB) / norm(dA)`, d the parameter change in float64, A the reference. The
gradient error is the same for the gradients the optimizer gets, in steps with a learning rate of 0: their weights are
the initial ones, so every split has the same completions. The invariance tests use the same code.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..stock import STOCK
from .report import IN_16_BITS, Split, SplitResult
from .runs import Run, RunResult

TOLERANCE = 1e-5  # relative update error in float32, the promise of the default mode
METRIC_TOLERANCE = 1e-4  # |a - b| / max(1, |a|) of a logged value: logs are float32 sums in another order
GRADIENT_TOLERANCE = 1e-5  # relative, in float32, without an optimizer to amplify it
SMALL_STEP = 0.1  # of the largest step's gradient: the least a step's error is measured against; a gradient may be 0
_TIMING = ("step_time", "total_flos")  # values that are no result of the algorithm
_TIMING_ENDS = ("_runtime", "_per_second")
_LAYOUT_STARTS = ("time/", "layout/")  # the layout of a step, which a split changes


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
    """Largest `|a - b| / max(1, |a|)` over all logged values except timings, and its name."""
    if len(reference) != len(other):
        return math.inf, f"{len(reference)} against {len(other)} log lines"
    worst, name = 0.0, ""
    for line_a, line_b in zip(reference, other):
        for key in line_a.keys() | line_b.keys():
            if key in _TIMING or key.endswith(_TIMING_ENDS) or key.startswith(_LAYOUT_STARTS):
                continue
            gap = _relative_gap(line_a.get(key), line_b.get(key))
            if gap > worst:
                worst, name = gap, key
    return worst, name


def _relative_gap(a: Any, b: Any) -> float:
    if a == b:
        return 0.0
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return math.inf
    if math.isnan(a) and math.isnan(b):
        return 0.0
    return abs(a - b) / max(1.0, abs(a))


def compare(
    run: Run, split: Split, reference: RunResult, other: RunResult, tolerance: float = TOLERANCE
) -> SplitResult:
    """Compare two splits of `run`; with a trace compare hashes."""
    if other.error is not None:
        first_line = other.error.removeprefix("GrpoExtError: ").split("\n")[0][:200]
        return SplitResult(split, run.trainer, "refused", first_line)
    result = SplitResult(split, run.trainer, "same")
    result.update_error = update_error(reference.delta, other.delta)
    result.metric_error, metric = metric_difference(reference.log, other.log)
    if reference.gradients and other.gradients:
        result.gradient_error = gradient_error(reference.gradients, other.gradients)
    if not any(bool(d.any()) for d in other.delta.values()):
        nothing = "no parameter moved: no group had rewards that differ, or the learning rate is 0; train more steps"
        result.verdict, result.reason = "nothing learned", nothing
    elif other is reference:
        result.verdict = "reference"
    elif run.trace:
        log_reason = f"only the log differs, most in {metric}" if result.metric_error > 0.0 else ""
        result.reason = _first_different_hash(reference.trace, other.trace) or log_reason
        result.verdict = "differs" if result.reason else "same bits"
    else:
        result.reason = _difference(run, result, reference, other, tolerance, metric)
        result.verdict = "differs" if result.reason else "same"
    return result


def _first_different_hash(reference: list[dict[str, str]], other: list[dict[str, str]]) -> str:
    """The first step and tensor whose hashes differ; empty where all are the same."""
    for step, (a, b) in enumerate(zip(reference, other), start=1):
        if different := sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)):
            return f"the first difference is in {different[0]} after step {step}"
    return "" if len(reference) == len(other) else f"{len(reference)} against {len(other)} steps"


def _difference(
    run: Run, result: SplitResult, reference: RunResult, other: RunResult, tolerance: float, metric: str
) -> str:
    """Why a split differs; empty where update, gradient and log are within their tolerances."""
    wrong_gradient = run.in_float32 and result.gradient_error > GRADIENT_TOLERANCE
    if result.update_error <= tolerance and result.metric_error <= METRIC_TOLERANCE and not wrong_gradient:
        return ""
    if cause := _known_cause(run, reference, other):
        return cause
    if result.update_error <= tolerance:
        only_log = f"only the log differs, most in {metric}"
        return "the gradient differs, the update hides it" if wrong_gradient else only_log
    if reference.delta.keys() != other.delta.keys():
        return "the trained parameters differ"
    return describe_difference(reference.delta, other.delta)


def _known_cause(run: Run, reference: RunResult, other: RunResult) -> str:
    """What makes a split differ, where the settings or the first log line tell."""
    if run.trainer == STOCK and reference.log and other.log:
        sampled = ("completions/mean_length", "reward", "num_tokens")
        if any(_relative_gap(reference.log[0].get(k), other.log[0].get(k)) > 1e-6 for k in sampled):
            return "the first rollout differs (each process samples with a seed of its own)"
    if run.config.get("allow_split_dependent"):
        return "allow_split_dependent=True: dropout or batch statistics depend on the micro-batch"
    return "" if run.in_float32 else IN_16_BITS
