"""Compares two runs of `grpo-ext check`: their folders as `grpo-ext diff` does, and the exact changes beside.

The relative update error is `norm(dA - dB) / norm(dA)`, where d is the parameter change in float64 and A the reference.
The gradient error is the same for the first gradient: weights and completions are the same in every split there, and
the optimizer has not amplified any rounding. Both may only make the verdict of the folders worse.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ...errors import LaunchError
from ...run.case_comparison import ALL, Tensors, alike
from ...run.diff import compare_runs, read_run
from ...run.record import Record, finite
from ...run.rounding import ROUNDING, SAME_GRADIENT, SAME_LOG, SAME_UPDATE, relative
from ...run.trail_comparison import Comparison, Difference
from ..stock import OURS, STOCK
from .runs import Run, RunResult

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
    metric_error: float = math.nan  # the largest relative difference of a logged value, until another stage differs

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
            return f"At least one split {'learns something else' if self.differs else 'was refused'}."
        same = "Every split of grpo_ext learns the same"
        if "rounding" in verdicts:
            return (
                "rounding: gradients agree within the run's precision (half precision: docs/precision.md says which "
                "micro-batches agree best). Adam moves an element whose gradient is rounding noise by a whole learning "
                f"rate; a larger adam_epsilon damps this.\n{same}, to rounding."
            )
        return f"{same}, to the bit." if "same bits" in verdicts else f"{same}."

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with None for NaN and infinity."""
        return {"ok": self.ok, "steps": self.steps, "results": finite([dataclasses.asdict(r) for r in self.results])}


def update_error(reference: Tensors, other: Tensors) -> float:
    """`norm(dA - dB) / norm(dA)` over all parameters; 0 if neither moved, infinity if only B did."""
    return alike(reference, other)[ALL]["difference"] if reference.keys() == other.keys() else math.inf


def compare(
    run: Run, split: Split, reference: RunResult, other: RunResult, tolerance: float = SAME_UPDATE
) -> SplitResult:
    """Compare two splits of `run`; with a trace no difference is rounding.

    Raises:
        LaunchError: the record of one of them lacks a step.
    """
    result = SplitResult(split, run.trainer)
    if other.error is not None:
        result.reason = other.error.removeprefix("GrpoExtError: ").split("\n")[0][:200]
        return result
    one, two = (read_run(trained.folder) for trained in (reference, other))
    comparison, steps = compare_runs(one, two), run.config["max_steps"]
    if comparison.steps < steps:
        raise LaunchError(f"{split}: the records have {comparison.steps} of {steps} steps. Is the disk full?")
    first = comparison.first
    logged = first.error if first is not None and first.stage == "values" else 0.0
    result.metric_error = max(logged, comparison.largest.get("values", 0.0))
    result.update_error = update_error(reference.delta, other.delta)
    if not run.trace:
        norm, other_norm = (trained.record.steps[1]["values"].get("grad_norm") for trained in (one, two))
        gradients = reference.gradients, other.gradients
        result.gradient_error = math.hypot(update_error(*gradients), relative(norm, other_norm, least=0.0))
    if not any(bool(d.any()) for d in other.delta.values()):
        why = "no parameter moved: in every group all rewards are equal, or the learning rate is 0; train more steps"
        result.verdict, result.reason = "nothing learned", why
    elif other is reference:
        result.verdict = "reference"
    elif run.trace:
        result.verdict, result.reason = _exact_verdict(comparison, reference.trace == other.trace)
    else:
        result.verdict, result.reason = _verdict(result, comparison, one.is_half or two.is_half, tolerance)
    if result.verdict == "differs":
        result.reason = _known_cause(run, one.record, two.record) or result.reason
    return result


def _exact_verdict(comparison: Comparison, same_tensors: bool) -> tuple[str, str]:
    stage = _stage(comparison.begins or comparison.first)
    if same_tensors and not stage:
        return "same bits", ""
    return "differs", stage or "the state of the optimizer differs"


def _verdict(result: SplitResult, comparison: Comparison, half: bool, tolerance: float) -> tuple[str, str]:
    first, stage = comparison.first, _stage(comparison.first)
    # once weights differ, half precision changes sampled tokens; all splits sample the first step alike
    sampled = half and first is not None and first.stage == "completions" and first.step > 1
    if stage and not sampled:
        return "differs", stage
    for what, error in (("gradient", result.gradient_error), ("weights", result.update_error)):
        # once tokens differ, it is another run
        most = math.inf if sampled and what == "weights" else ROUNDING[what][half]
        if not error <= most:  # or NaN
            return "differs", f"{what}: the exact difference is more than rounding ({most:g})"
    alike = result.gradient_error <= SAME_GRADIENT and result.update_error <= tolerance
    return "same" if alike and result.metric_error <= SAME_LOG and not stage else "rounding", stage


def _stage(first: Difference | None) -> str:
    return "" if first is None else f"{first.stage} at step {first.step}: {first.what}"


def _known_cause(run: Run, reference: Record, other: Record) -> str:
    """Why a split differs, if that is known."""
    one, two = reference.steps[1]["values"], other.steps[1]["values"]
    if run.trainer == STOCK and any(relative(one.get(k), two.get(k)) > 1e-6 for k in _SAMPLED):
        return "the first rollout differs (each process has its own sampling seed)"
    if run.config.get("allow_split_dependent"):
        return "allow_split_dependent=True: dropout or batch statistics depend on the micro-batch"
    return ""
