"""`grpo-ext diff`: at which step and stage two runs diverge, by how much, and what that means.

Compares settings, versions and machines from `log.jsonl`, then the trails (`run.trail`) in the order of a step.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pandas

from ..errors import ConfigError, shortened
from ..settings import decides, named
from .fingerprint import LAYOUT_SIZES, differences
from .log import LOG, read_log
from .trail import TRAIL, ReadTrail, read_trail
from .trail_comparison import SAME, Comparison, Difference, both, compare_trails

_ROWS, _COLUMNS = "data.rows_sha256", "data.by_column"
_PLAIN = {_ROWS: "data (the hash of its rows)", "rewards": "rewards (the functions)"}
Changes = list[tuple[str, Any, Any]]  # name, both values
# the stages of the trail whose settings the table has under another name
_DECIDED = {"values": "loss", "optimizer": "schedule", "weights": "optimizer"}
_MEANINGS = {  # of a first difference, and its cause where no setting differs
    "prompts": ("The runs have different prompts. What decides them", "the data set, its order, or the chat template"),
    "completions": (
        "Sampling has other settings",
        "the sampler itself (an override, an engine, the answer of a tool), or other kernels",
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
    start: Mapping[str, Any]  # of its last training call, from the log
    trail: ReadTrail

    @property
    def settings(self) -> dict[str, Any]:
        """What the run means: settings, data, model, rewards."""
        parts = {name: self.start[name] for name in named("part") if name in self.start}
        return dict(self.start.get("settings") or {}) | parts

    @property
    def besides(self) -> dict[str, Any]:
        geometry = self.start.get("geometry") or {}
        layout = {name: geometry.get(name) for name in LAYOUT_SIZES}
        return {"versions": self.start.get("versions"), "environment": self.start.get("environment"), "layout": layout}

    @property
    def half(self) -> bool:
        settings = self.settings
        loaded = {"torch.bfloat16", "torch.float16"}.intersection((settings["model"] or {}).get("dtypes") or ())
        return bool(loaded or settings.get("bf16") or settings.get("fp16")) and not settings.get("bitwise_invariant")


def read_run(folder: str | Path) -> RunOnDisk:
    """A run by its folder; a ConfigError where it has no trail or has not begun."""
    for name in (LOG, TRAIL):
        if not (Path(folder) / name).is_file():
            raise ConfigError(
                f"{folder} is not the output_dir of a run that can be compared: it has no {name}. Runs of grpo_ext "
                "write it when they begin to train; trail=False turns the trail off."
            )
    starts = read_log(Path(folder) / LOG).starts
    if not starts:
        raise ConfigError(f"{Path(folder) / LOG} has no start of a run; name the output_dir of a run that has begun.")
    if not starts[-1].get("trail"):
        raise ConfigError(f"the last start of {folder} had trail=False, so its trail is of an earlier one.")
    return RunOnDisk(Path(folder), starts[-1], read_trail(Path(folder) / TRAIL))


def diff(one: str | Path, other: str | Path) -> Comparison:
    """Compare two runs by their folders; a ConfigError where there is nothing to compare."""
    return compare_runs(read_run(one), read_run(other))


def compare_runs(a: RunOnDisk, b: RunOnDisk) -> Comparison:
    settings, besides = changes(a.settings, b.settings), changes(a.besides, b.besides)
    notes = [f"{title}: {listed(c)}" for title, c in (("Settings", settings), ("Besides the settings", besides)) if c]
    sizes = [(run.start.get("geometry") or {}).get("global_batch_size") for run in (a, b)]
    if sizes[0] != sizes[1]:
        what = f"steps of {sizes[0]} and of {sizes[1]} completions (global_batch_size) cannot be compared."
        raise ConfigError("\n".join([what, *notes]))
    comparison = compare_trails(a.trail, b.trail, a.half or b.half)
    if not comparison.steps:
        trained = [sorted(run.trail.steps.keys() - {0}) for run in (a, b)]
        known = [f"steps {steps[0]} to {steps[-1]}" if steps else "no step" for steps in trained]
        raise ConfigError(f"the runs have no step in common: A has trained {known[0]}, B {known[1]}.")
    if (first := comparison.first) is not None:
        uncertain = bool(comparison.largest) or a.half or b.half or bool(besides)
        few = first.stage == "completions" and first.of > 1 and first.count * 2 <= first.of
        if uncertain and few and not (_among(settings, "completions") or _among(settings, "weights")):
            comparison.verdict = "few tokens"
        comparison.meaning = _meaning(comparison, first, settings, besides)
        notes += [*_where_texts_part(first, a.folder, b.folder), *_rewards(a.folder, b.folder)]
    ends = [f"{max(r.trail.steps)}{'' if 'ended' in r.start else ' (killed, or still training)'}" for r in (a, b)]
    if ends[0] != ends[1] or " " in ends[0]:
        notes.append(f"The last step of A is {ends[0]}, that of B {ends[1]}; {comparison.steps} steps were compared.")
    comparison.notes += notes
    return comparison


def _where_texts_part(first: Difference, *folders: Path) -> Iterator[str]:
    """Where the first texts that differ part, if both runs have TRL's table of the step (`log_completions`)."""
    paths = [folder / "completions" / f"completions_{first.step:05d}.parquet" for folder in folders]
    if first.stage == "completions" and all(path.is_file() for path in paths):
        tables = [pandas.read_parquet(path)[["prompt", "completion"]].astype(str).values for path in paths]
        pairs = ((a[1], b[1]) for a, b in zip(*tables, strict=False) if a[0] == b[0] and a[1] != b[1])
        for one, other in islice(pairs, 1):
            place = next(i for i in range(len(one) + 1) if one[i : i + 1] != other[i : i + 1])
            both_texts = f"{one[place:][:20]!r} and {other[place:][:20]!r}"
            yield f"At step {first.step} the texts part at character {place}: {both_texts}."


def _rewards(*folders: Path) -> Iterator[str]:
    """The logged rewards of both at up to 8 of their common steps."""
    logs = [read_log(folder / LOG).entries for folder in folders]
    one, other = ({e["step"]: e["values"]["reward"] for e in log if "reward" in e["values"]} for log in logs)
    steps = sorted(one.keys() & other.keys())
    if shown := [f"step {s}: {both(one[s], other[s])}" for s in steps[:: math.ceil(len(steps) / 8) or 1]]:
        yield f"Rewards of A and B: {'; '.join(shown)}."


def changes(a: dict[str, Any], b: dict[str, Any]) -> Changes:
    """What differs; not parts that one of the runs was too early to note."""
    names = [name for name in {**a, **b} if (name in a and name in b) or name not in named("part")]
    found = [pair for pair in differences({name: (a.get(name), b.get(name)) for name in names}) if pair[1] != pair[2]]
    left_out = {_COLUMNS}  # of which an earlier version noted none
    if any(name.startswith(f"{_COLUMNS}.") for name, *_ in found):
        left_out.add(_ROWS)  # the columns say more
    return [(_PLAIN.get(name, name), old, new) for name, old, new in found if name not in left_out]


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
