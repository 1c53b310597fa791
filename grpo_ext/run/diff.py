"""`grpo-ext diff`: at which step and stage two runs diverge, by how much, and what that means.

Compares settings, versions and machines of every start, then the trails in the order of a step. Imports neither torch
nor TRL.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..batching.sizes import LAYOUT_SIZES
from ..errors import ConfigError, shortened
from ..settings import decides, named
from .record import STEPS, Identity, Line, Record, differences, read_record, tables_of
from .trail_comparison import SAME, Comparison, Difference, both, compare_trails

Changes = list[tuple[str, Any, Any]]  # name, both values
# the stages of the trail whose settings the table has under another name
_DECIDED = {"values": "loss", "optimizer": "schedule", "weights": "optimizer"}
_MEANINGS = {  # of a first difference, and its cause where no setting differs
    "prompts": ("The runs have different prompts. What decides them", "the data set, its order, or the chat template"),
    "completions": (
        "Sampling has other settings",
        "the sampler itself (an override, an engine, the answer of a tool), weights that something wrote between two "
        "steps (a callback; frozen ones have no digest), or other kernels",
    ),
    "rewards": ("The completions are the same. The cause", "a reward function that changed, or is not deterministic"),
    "advantages": ("The rewards are the same, so advantages are computed differently", "an override"),
    "values": ("Advantages are the same, so the loss is computed differently", "an override, or a fault of a layout"),
    "optimizer": ("The learning rate follows another schedule", "a callback, or a scheduler of another length"),
    "weights": ("The gradient is the same, so the optimizer differs", "its state, or what else changed the weights"),
}


@dataclass(frozen=True)
class RunOnDisk:
    folder: Path
    record: Record

    def settings(self, step: int) -> Identity:
        """What the run meant where it made a step: settings, data, model, rewards."""
        return settings_of(self.record.start_of(step))

    def besides(self, step: int) -> Identity:
        start = self.record.start_of(step)
        layout = {name: (start.get("geometry") or {}).get(name) for name in LAYOUT_SIZES}
        return {"versions": start.get("versions"), "environment": start.get("environment"), "layout": layout}

    def size(self, step: int) -> Any:
        return (self.record.start_of(step).get("geometry") or {}).get("global_batch_size")

    @property
    def is_half(self) -> bool:
        settings = settings_of(self.record.starts[-1])
        loaded = {"torch.bfloat16", "torch.float16"}.intersection((settings.get("model") or {}).get("dtypes") or ())
        return bool(loaded or settings.get("bf16") or settings.get("fp16")) and not settings.get("bitwise_invariant")


def settings_of(start: Line) -> Identity:
    parts = {name: start[name] for name in named("part") if name in start}
    return dict(start.get("settings") or {}) | parts


def read_run(folder: str | Path) -> RunOnDisk:
    """A run by its folder; a ConfigError where it has no trail or has not begun."""
    record = read_record(folder)
    if not record.starts:
        raise ConfigError(f"{Path(folder) / STEPS} has no start of a run; name the output_dir of a run that has begun.")
    if not record.steps and not record.starts[-1].get("trail"):
        raise ConfigError(f"{folder} cannot be compared: the run had trail=False, so its record has no steps.")
    return RunOnDisk(Path(folder), record)


def diff(one: str | Path, other: str | Path) -> Comparison:
    """Compare two runs by their folders; a ConfigError where there is nothing to compare."""
    return compare_runs(read_run(one), read_run(other))


def compare_runs(a: RunOnDisk, b: RunOnDisk) -> Comparison:
    common = sorted({*a.record.trained} & {*b.record.trained}) or [1]
    resumed = {step + 1 for run in (a, b) for step in run.record.resumed_from if common[0] <= step < common[-1]}
    begins = sorted({common[0], *resumed})
    settings, besides = (_of_starts(a, b, begins, kind) for kind in (RunOnDisk.settings, RunOnDisk.besides))
    notes = [f"{title}: {listed(c)}" for title, c in (("Settings", settings), ("Besides the settings", besides)) if c]
    if sizes := next(((a.size(step), b.size(step)) for step in begins if a.size(step) != b.size(step)), None):
        what = f"steps of {sizes[0]} and of {sizes[1]} completions (global_batch_size) cannot be compared."
        raise ConfigError("\n".join([what, *notes]))
    comparison = compare_trails(a.record, b.record, a.is_half or b.is_half)
    if not comparison.steps:
        trained = [run.record.trained for run in (a, b)]
        known = [f"steps {steps[0]} to {steps[-1]}" if steps else "no step" for steps in trained]
        raise ConfigError(f"the runs have no step in common: A has trained {known[0]}, B {known[1]}.")
    if (first := comparison.first) is not None:
        until = [step for step in begins if step <= max(first.step, common[0])]  # what changed later is no cause
        settings, besides = (_of_starts(a, b, until, kind) for kind in (RunOnDisk.settings, RunOnDisk.besides))
        uncertain = bool(comparison.largest) or a.is_half or b.is_half or bool(besides)
        few = first.stage == "completions" and first.of > 1 and first.count * 2 <= first.of
        if uncertain and few and not (_among(settings, "completions") or _among(settings, "weights")):
            comparison.verdict = "few tokens"
        comparison.meaning = _meaning(comparison, first, settings, besides)
        notes += [*_where_texts_part(first, a, b), *_rewards(a, b)]
    ends = [_end(run.record) for run in (a, b)]
    if ends[0] != ends[1] or " " in ends[0]:
        notes.append(f"The last step of A is {ends[0]}, that of B {ends[1]}; {comparison.steps} steps were compared.")
    comparison.notes += notes
    return comparison


def _end(record: Record) -> str:
    return f"{max(record.steps)}{'' if 'ended' in record.starts[-1] else ' (killed, or still training)'}"


def _of_starts(
    a: RunOnDisk, b: RunOnDisk, begins: Sequence[int], kind: Callable[[RunOnDisk, int], Identity]
) -> Changes:
    """What differs at any of these first steps of training calls."""
    found = [change for step in begins for change in changes(kind(a, step), kind(b, step))]
    return [change for place, change in enumerate(found) if change not in found[:place]]


def _where_texts_part(first: Difference, *runs: RunOnDisk) -> Iterator[str]:
    """Where the first texts that differ part, if both runs have TRL's table of the step (`log_completions`)."""
    paths = [tables_of(run.folder, run.record).get(first.step) for run in runs]
    if first.stage == "completions" and None not in paths:
        tables = [_texts(path) for path in paths if path is not None]
        pairs = ((a[1], b[1]) for a, b in zip(*tables, strict=False) if a[0] == b[0] and a[1] != b[1])
        for one, other in islice(pairs, 1):
            place = next(i for i in range(len(one) + 1) if one[i : i + 1] != other[i : i + 1])
            both_texts = f"{one[place:][:20]!r} and {other[place:][:20]!r}"
            yield f"At step {first.step} the texts part at character {place}: {both_texts}."


def _texts(path: Path) -> list[tuple[str, str]]:
    """The prompts and completions of a table; none where a kill has cut it."""
    import pyarrow.parquet

    with contextlib.suppress(OSError, ValueError):
        columns = pyarrow.parquet.read_table(path, columns=["prompt", "completion"]).to_pydict()
        return list(zip(map(str, columns["prompt"]), map(str, columns["completion"]), strict=True))
    return []


def _rewards(*runs: RunOnDisk) -> Iterator[str]:
    """The logged rewards of both at up to 8 of their common steps."""
    logs = [run.record.entries for run in runs]
    one, other = ({e["step"]: e["values"]["reward"] for e in log if "reward" in e["values"]} for log in logs)
    steps = sorted(one.keys() & other.keys())
    if shown := [f"step {s}: {both(one[s], other[s])}" for s in steps[:: math.ceil(len(steps) / 8) or 1]]:
        yield f"Rewards of A and B: {'; '.join(shown)}."


def changes(a: Identity, b: Identity) -> Changes:
    """What differs; not parts that one of the runs was too early to note."""
    names = [name for name in {**a, **b} if (name in a and name in b) or name not in named("part")]
    found = differences({name: (a.get(name), b.get(name)) for name in names})
    return [
        ("rewards (the functions)" if name == "rewards" else name, old, new) for name, old, new in found if old != new
    ]


def listed(changes: Changes) -> str:
    shown = [f"{name} {shortened(repr(old), 80)} -> {shortened(repr(new), 80)}" for name, old, new in changes[:12]]
    shown += [f"and {len(changes) - 12} more"] if len(changes) > 12 else []
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", "; ".join(shown))  # the beginnings of hashes


def _among(changes: Changes, stage: str) -> list[str]:
    """The differences that decide a stage of the trail."""
    return [name for name, _, _ in changes if decides(name, _DECIDED.get(stage, stage))]


def _meaning(comparison: Comparison, first: Difference, settings: Changes, besides: Changes) -> str:
    """A sentence on the likely cause of the first difference."""
    if first.step == 0:
        return "The runs begin with different weights: another model or adapter, or a trainer that had trained before."
    optimizer = _among(settings, "weights")
    if optimizer and "weights" in comparison.largest and first.stage in ("completions", "values"):
        return f"The weights had begun to differ, and the optimizer has other settings: {', '.join(optimizer)}."
    if known := _among(settings, first.stage):
        return f"{_MEANINGS[first.stage][0]}: {', '.join(known)}."
    others = [name for name, _, _ in (*settings, *besides)]  # of which none is known to decide this stage
    if first.stage == "completions":
        last, alike = comparison.weights_known, SAME["rounding" if comparison.largest else "same bits"]
        weights = f"The weights were {alike} after step {last}, when they were last compared. " if last >= 0 else ""
        return f"{weights}What may have sampled differently: {', '.join(others or [_MEANINGS[first.stage][1]])}."
    guess = _MEANINGS[first.stage][1]
    if settings:
        guess = f"{', '.join(others)} (no setting that is known to decide this), or {guess}"
    return f"{_MEANINGS[first.stage][0]}: {guess}."
