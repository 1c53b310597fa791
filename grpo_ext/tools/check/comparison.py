"""Compares two runs, for `grpo-ext check` and the invariance tests: their updates, gradients, logs and bits.

The relative update error is `norm(dA - dB) / norm(dA)`, where d is the parameter change in float64 and A the reference.
The gradient error is the same for the first gradient: weights and completions are the same in every split there, and
the optimizer has not amplified any rounding.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from ...run.rounding import ROUNDING, SAME_GRADIENT, SAME_LOG, SAME_UPDATE, relative
from ...run.trail_comparison import compare_trails
from ..stock import OURS, STOCK
from .runs import Run, RunResult

# values that do not follow from the algorithm, or that depend on the split
_NOT_COMPARED = re.compile(r"step_time|total_flos|.*(_runtime|_per_second)|(time|layout)/.*")
_SAMPLED = ("completions/mean_length", "reward", "num_tokens")  # values that reveal different completions


@dataclass(frozen=True)
class Split:
    """A hardware split: completions per forward, processes, and how many of these share each forward."""

    micro_batch_size: int
    processes: int = 1
    sequence_parallel_size: int = 1

    def __str__(self) -> str:
        shared = f", each over {self.sequence_parallel_size}" if self.sequence_parallel_size > 1 else ""
        return f"{self.processes} x {self.micro_batch_size}{shared}"

    @property
    def settings(self) -> dict[str, int]:
        return {
            "per_device_train_batch_size": self.micro_batch_size,
            "sequence_parallel_size": self.sequence_parallel_size,
        }


@dataclass
class SplitResult:
    """How a split compares with the reference split of the same trainer; an error that was not measured is NaN."""

    split: Split
    trainer: str
    verdict: str = "refused"  # "reference", "same", "same bits", "rounding", "differs", "nothing learned" or "refused"
    reason: str = ""  # the cause, if it is known
    update_error: float = math.nan  # relative
    gradient_error: float = math.nan  # relative, of the first gradient
    metric_error: float = math.nan  # the largest difference of a logged value

    def __str__(self) -> str:
        errors = {"gradient": self.gradient_error, "update": self.update_error}
        known = [f"{name} {error:.1e}" for name, error in errors.items() if not math.isnan(error)]
        shown = f" ({', '.join(known)})" if known and self.verdict != "reference" else ""
        return f"{self.trainer}, {self.split}: {self.verdict}{shown}{self.reason and f': {self.reason}'}"


@dataclass
class CheckReport:
    results: list[SplitResult]
    steps: int

    @property
    def ok(self) -> bool:
        """Whether all splits of this package's trainer learned the same."""
        return all(r.verdict in ("reference", "same", "same bits", "rounding") for r in self.of(OURS))

    @property
    def differs(self) -> bool:
        return any(r.verdict == "differs" for r in self.of(OURS))

    def of(self, trainer: str) -> list[SplitResult]:
        return [r for r in self.results if r.trainer == trainer]

    def conclusion(self) -> str:
        verdicts = {r.verdict for r in self.of(OURS)}
        if "nothing learned" in verdicts:
            return "Nothing was learned, so there is nothing to compare."
        if not self.ok:
            return "At least one split learns something else."
        same = "Every split of grpo_ext learns the same"
        if "rounding" in verdicts:
            return (
                "rounding: gradients agree within the run's precision (half precision: docs/precision.md says which "
                "micro-batches agree best). Adam moves an element whose gradient is rounding noise by a whole learning "
                f"rate; a larger adam_epsilon damps this.\n{same}, to rounding."
            )
        return f"{same}, to the bit." if "same bits" in verdicts else f"{same}."

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with None for NaN."""
        results = [dataclasses.asdict(r) for r in self.results]
        plain = [{n: None if isinstance(v, float) and math.isnan(v) else v for n, v in r.items()} for r in results]
        return {"ok": self.ok, "steps": self.steps, "results": plain}


def update_error(reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """`norm(dA - dB) / norm(dA)` over all parameters, in float64; 0 if neither moved, infinity if only B did."""
    if reference.keys() != other.keys():
        return math.inf
    difference = math.sqrt(sum(float((other[n].double() - d.double()).norm()) ** 2 for n, d in reference.items()))
    norm = math.sqrt(sum(float(d.double().norm()) ** 2 for d in reference.values()))
    return difference / norm if norm else (0.0 if difference == 0.0 else math.inf)


def norm_error(reference: RunResult, other: RunResult) -> float:
    """Relative error of the first gradient's norm, which is logged before clipping."""
    one, two = ({"norm": torch.tensor(run.log[0].get("grad_norm", math.nan))} for run in (reference, other))
    return update_error(one, two)


def gradient_error(reference: RunResult, other: RunResult) -> float:
    """Relative error of the first gradient over all parameters, and of its norm."""
    return math.hypot(update_error(reference.gradients, other.gradients), norm_error(reference, other))


def describe_difference(reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    """Name the parameter that differs most, with its largest and mean difference."""
    if reference.keys() != other.keys():
        return "the trained parameters differ"
    gaps = {name: (other[name].double() - d.double()).abs() for name, d in reference.items()}
    worst = max(gaps, key=lambda name: float(gaps[name].max()))
    return f"largest difference {float(gaps[worst].max()):.2e} (mean {float(gaps[worst].mean()):.2e}) in {worst}"


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


def compare(
    run: Run, split: Split, reference: RunResult, other: RunResult, tolerance: float = SAME_UPDATE
) -> SplitResult:
    """Compare two splits of `run`; with a trace compare hashes.

    The verdict is "same" within all tolerances, and "rounding" within `ROUNDING`.
    """
    result = SplitResult(split, run.trainer)
    if other.error is not None:
        result.reason = other.error.removeprefix("GrpoExtError: ").split("\n")[0][:200]
        return result
    result.update_error = update_error(reference.delta, other.delta)
    result.metric_error, metric = metric_difference(reference.log, other.log)
    if not run.trace:
        result.gradient_error = gradient_error(reference, other)
    result.verdict, result.reason = _verdict(run, result, reference, other, tolerance, metric)
    return result


def _verdict(
    run: Run, result: SplitResult, reference: RunResult, other: RunResult, tolerance: float, metric: str
) -> tuple[str, str]:
    only_log = f"only the log differs, most in {metric}"
    if not any(bool(d.any()) for d in other.delta.values()):
        why = "no parameter moved: in every group all rewards are equal, or the learning rate is 0; train more steps"
        return "nothing learned", why
    if other is reference:
        return "reference", ""
    first = compare_trails(reference.record, other.record, half=not run.in_float32, exact=run.trace).first
    stage = "" if first is None else f"{first.stage} at step {first.step}: {first.what}"  # stock TRL has no record
    if run.trace and reference.trace == other.trace:
        return ("differs", stage or only_log) if result.metric_error else ("same bits", "")
    if run.trace:
        return "differs", stage or "the state of the optimizer differs"
    same_gradient, same_update = result.gradient_error <= SAME_GRADIENT, result.update_error <= tolerance
    if same_gradient and same_update and result.metric_error <= SAME_LOG:
        return "same", ""
    # in half precision "sampling/" measures rounding itself
    noise = () if run.in_float32 else ("sampling/",)
    bounds = {what: pair[not run.in_float32] for what, pair in ROUNDING.items()}
    first_lines = [[{n: v for n, v in r.log[0].items() if not n.startswith(noise)}] for r in (reference, other)]
    start, name = max(metric_difference(*first_lines), (norm_error(reference, other), "grad_norm"))
    near, begins = result.gradient_error <= bounds["gradient"], start <= bounds["first log"]
    if near and begins and result.update_error <= bounds["weights"] and result.metric_error <= bounds["log"]:
        return "rounding", ""
    what = f"{name} differs by {start:.1e} in the first log line," if near else "the gradient differs by"
    limit = bounds["first log"] if near else bounds["gradient"]
    beyond = "" if run.in_float32 or (near and begins) else f"{what} more than 16-bit rounding ({limit:g})"
    if cause := _known_cause(run, reference, other, beyond or stage):
        return "differs", cause
    if same_update:
        return "differs", only_log if same_gradient else "the gradient differs, but the update hides it"
    return "differs", describe_difference(reference.delta, other.delta)


def _known_cause(run: Run, reference: RunResult, other: RunResult, otherwise: str) -> str:
    """Why a split differs, if that is known."""
    one, two = reference.log[0], other.log[0]
    if run.trainer == STOCK and any(relative(one.get(k), two.get(k)) > 1e-6 for k in _SAMPLED):
        return "the first rollout differs (each process has its own sampling seed)"
    if run.config.get("allow_split_dependent"):
        return "allow_split_dependent=True: dropout or batch statistics depend on the micro-batch"
    return otherwise
