"""`grpo-ext diff`: at which step and stage two runs part, by how much, and what that means.

Compares settings, versions and machines from `log.jsonl`, then the trails (`run.trail`) in the order in which a step is
made. `grpo-ext check` compares its splits in the same way.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..algorithms.digests import distance
from ..errors import ConfigError
from ..run.fingerprint import LAYOUT_SIZES, differences
from ..run.log import LOG, read_log
from ..run.trail import TRAIL, ReadTrail, read_trail

Verdict = Literal["same bits", "rounding", "one token", "different"]
SAME: tuple[Verdict, ...] = ("same bits", "rounding")
_SENTENCES: dict[Verdict, str] = {
    "same bits": "The runs have the same bits.",
    "rounding": "The runs are the same up to rounding.",
    "one token": "The runs are the same until step {step}, where {count} changed; from there on they diverge.",
    "different": "The runs are different, from step {step} on.",
}
# the largest relative differences that count as rounding: of a logged value, of a sum of all updates so far
_FLOAT32, _HALF = (1e-4, 1e-2), (5e-2, 0.5)
_UNCOMPARED = ("time/", "layout/", "step_time", "sampling/")  # timings, the layout, diagnostics of the sampler
_FIRST = ("loss", "grad_norm")  # the values that are compared before all others
_OF_ROLLOUTS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "max_completion_length"),
    *("num_generations", "rollout_chunk_size", "seed"),
)
_OF_OPTIMIZER = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm"),
)


@dataclass(frozen=True)
class Difference:
    """The first difference of a stage."""

    step: int
    stage: str  # prompts, completions, rewards, advantages, values or weights
    what: str  # where, and by how much
    count: int = 1  # how many prompts, completions, ... differ
    of: int = 1
    error: float = math.inf  # relative; infinite where any difference is one


@dataclass
class Comparison:
    """How two runs compare; `first` is None where nothing differs by more than rounding."""

    verdict: Verdict
    steps: int  # that both have
    first: Difference | None
    meaning: str = ""
    largest: dict[str, float] = field(default_factory=dict)  # the largest difference that counts as rounding, by stage
    changed_completions: dict[int, float] = field(default_factory=dict)  # share that differs, by step
    notes: list[str] = field(default_factory=list)  # what differs beside the trails

    @property
    def text(self) -> str:
        first = self.first
        count = "" if first is None else f"{first.count} of {first.of} completions"
        lines = [_SENTENCES[self.verdict].format(step=first and first.step, count=count)]
        if first is not None:
            lines.append(f"{first.stage}: {first.what}")
        lines += [self.meaning] if self.meaning else []
        if self.verdict == "rounding":
            lines.append("Largest differences: " + ", ".join(f"{n} {e:.1e}" for n, e in self.largest.items() if e))
        if self.changed_completions:
            steps = sorted(self.changed_completions)
            shares = [f"{self.changed_completions[step]:.0%} at step {step}" for step in (steps[0], steps[-1])]
            lines.append("Completions that differ: " + ", ".join(dict.fromkeys(shares)) + ".")
        return "\n".join([*lines, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"text": self.text}


@dataclass(frozen=True)
class RunOnDisk:
    start: Mapping[str, Any]  # of its last training call
    trail: ReadTrail

    @property
    def settings(self) -> dict[str, Any]:
        """What the run means: settings, data, model, rewards."""
        settings = dict(self.start.get("settings") or {})
        parts = ("data", "model", "tokenizer", "end_tokens", "rewards", "tools")
        return settings | {name: self.start.get(name) for name in parts}

    @property
    def layout(self) -> dict[str, Any]:
        geometry = self.start.get("geometry") or {}
        return {name: geometry.get(name) for name in LAYOUT_SIZES}

    @property
    def half(self) -> bool:
        return bool(self.settings.get("bf16") or self.settings.get("fp16")) and not self.settings.get(
            "bitwise_invariant"
        )


def read_run(folder: str | Path) -> RunOnDisk:
    """A run by its folder; a ConfigError where it has no trail or has not begun."""
    trail, log = Path(folder) / TRAIL, Path(folder) / LOG
    if not trail.is_file() or not log.is_file():
        raise ConfigError(
            f"{folder} has no {TRAIL if log.is_file() else LOG}; name the output_dir of two runs of grpo_ext that were "
            "not trained with trail=False."
        )
    starts = read_log(log).starts
    if not starts:
        raise ConfigError(f"{log} has no start of a run; name the output_dir of a run that has begun.")
    return RunOnDisk(starts[-1], read_trail(trail))


def diff(one: str | Path, other: str | Path) -> Comparison:
    """Compare two runs by their folders; a ConfigError where there is nothing to compare."""
    return compare_runs(read_run(one), read_run(other))


def compare_runs(a: RunOnDisk, b: RunOnDisk) -> Comparison:
    meaning = list(
        differences({name: (a.settings.get(name), b.settings.get(name)) for name in {**a.settings, **b.settings}})
    )
    meaning = [change for change in meaning if change[1] != change[2]]
    others = {name: (a.start.get(name), b.start.get(name)) for name in ("versions", "environment")}
    others["layout"] = (a.layout, b.layout)
    beside = [change for change in differences(others) if change[1] != change[2]]
    notes = [
        f"{title}: {_listed(changes)}" for title, changes in (("Settings", meaning), ("Beside them", beside)) if changes
    ]
    sizes = [run.start.get("geometry", {}).get("global_batch_size") for run in (a, b)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"steps of {sizes[0]} and of {sizes[1]} completions (global_batch_size) cannot be compared.\n"
            + "\n".join(notes)
        )
    found = compare_trails(a.trail, b.trail, a.half or b.half)
    if not found.steps:
        raise ConfigError("the runs have no step in common: at least one of them has not trained a step yet.")
    if found.first is not None and found.verdict == "different" and found.first.stage == "completions":
        uncertain = found.largest.get("weights", 0.0) > 0 or a.half or bool(beside)
        if uncertain and not _among(meaning, _OF_ROLLOUTS) and found.first.count * 2 <= found.first.of:
            found.verdict = "one token"
    found.meaning, found.notes = _meaning(found, meaning, beside), notes
    lengths = [max(run.trail.steps, default=0) for run in (a, b)]
    if lengths[0] != lengths[1]:
        found.notes.append(f"The runs have {lengths[0]} and {lengths[1]} steps; the first {found.steps} were compared.")
    return found


def _listed(changes: Sequence[tuple[str, Any, Any]]) -> str:
    shown = [f"{name} {old!r} -> {new!r}" for name, old, new in changes[:12]]
    return "; ".join(shown) + (f"; and {len(changes) - 12} more" if len(changes) > 12 else "")


def _among(changes: Sequence[tuple[str, Any, Any]], names: Sequence[str]) -> list[str]:
    return [name for name, _, _ in changes if name.split(".")[0] in names]


def _meaning(found: Comparison, meaning: list[tuple[str, Any, Any]], beside: list[tuple[str, Any, Any]]) -> str:
    """A sentence on the likely cause of the first difference."""
    if found.first is None:
        return "What differs beside the trails has changed nothing." if meaning or beside else ""
    stage, names = found.first.stage, [name for name, _, _ in meaning]
    apart = ", ".join(name for name, _, _ in beside)
    before = "the same bits" if not found.largest.get("weights") else "the same up to rounding"
    if stage == "prompts":
        known = _among(meaning, ("seed", "data_seed", "data", "tokenizer"))
        return f"Other data reached the model: {', '.join(known) or 'the data set, its order, or the chat template'}."
    if stage == "completions":
        if known := _among(meaning, _OF_ROLLOUTS):
            return f"Sampling was set otherwise: {', '.join(known)}."
        return (
            f"The weights that sampled were {before}. What may have sampled otherwise: "
            + (apart or "the sampler itself (an override, an engine), or another kernel")
            + "."
        )
    if stage == "rewards":
        return "The completions are the same, so a reward function changed, or does not always return the same value."
    if stage == "advantages":
        known = [n for n in names if n in ("scale_rewards", "advantage_estimator", "reward_weights")]
        return f"The rewards are the same, so advantages are computed otherwise: {', '.join(known) or 'an override'}."
    if stage == "values":
        known = [n for n in names if n not in _OF_ROLLOUTS and n not in _OF_OPTIMIZER]
        return (
            "Completions and advantages are the same, so the loss is computed otherwise: "
            + (", ".join(known) or "an override, or a fault of a layout")
            + "."
        )
    known = _among(meaning, _OF_OPTIMIZER)
    return f"Loss and gradient norm are the same, so the optimizer differs: {', '.join(known) or apart or 'its state'}."


# ---- Trails ----------------------------------------------------------------------------------------------------------


def compare_trails(a: ReadTrail, b: ReadTrail, half: bool) -> Comparison:
    """Compare the steps that both have, in the order in which they are made."""
    steps = min(max(a.steps, default=0), max(b.steps, default=0))
    found = Comparison("same bits", steps, None)
    value_limit, update_limit = _HALF if half else _FLOAT32
    limits = {"rewards": 1e-6, "advantages": value_limit, "values": value_limit, "weights": update_limit}
    for step in range(1, steps + 1):
        for difference in _of_step(step, a, b):
            if difference.stage == "completions":
                found.changed_completions[step] = difference.count / difference.of
            if found.first is not None:
                continue
            if difference.error > limits.get(difference.stage, 0.0):
                found.first, found.verdict = difference, "different"
            else:
                found.verdict = "rounding"
                found.largest[difference.stage] = max(found.largest.get(difference.stage, 0.0), difference.error)
    return found


def _of_step(step: int, a: ReadTrail, b: ReadTrail) -> Iterator[Difference]:
    """The differences of a step, in the order of its stages."""
    rollouts = a.rollouts.get(step), b.rollouts.get(step)
    if rollouts[0] is not None and rollouts[1] is not None:
        yield from _of_rollout(step, rollouts[0], rollouts[1])
    lines = a.steps.get(step), b.steps.get(step)
    if lines[0] is None or lines[1] is None:
        return
    yield from _of_values(step, lines[0]["values"], lines[1]["values"])
    if "weights" in lines[0] and "weights" in lines[1]:
        yield from _of_weights(step, a, b)


def _of_rollout(step: int, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    if len(a["rounds"]) != len(b["rounds"]):
        what = f"{len(a['rounds'])} and {len(b['rounds'])} rounds of dynamic sampling"
        yield Difference(step, "completions", what, of=max(len(a["rounds"]), len(b["rounds"])))
    for one, other in zip(a["rounds"], b["rounds"]):
        if one["prompts"] != other["prompts"] or one["rows"] != other["rows"]:
            yield _prompts(step, one, other)
            return
        if changed := _unequal(one["completions"], other["completions"]):
            what = f"{_place(one, changed[0])} has other tokens"
            yield Difference(step, "completions", what, len(changed), len(one["completions"]))
            return
        for name in [*one["rewards"], *(name for name in other["rewards"] if name not in one["rewards"])]:
            values = one["rewards"].get(name), other["rewards"].get(name)
            if values[0] is None or values[1] is None:
                yield Difference(step, "rewards", f"only one of the runs has the reward {name!r}")
            elif changed := _unequal(*values):
                first, second = values[0][changed[0]], values[1][changed[0]]
                what = f"{name} gave {first} and {second} for {_place(one, changed[0])}, the same completion"
                yield Difference(step, "rewards", what, len(changed), len(values[0]), _worst(*values))
    if a["chosen"] != b["chosen"]:
        yield Difference(step, "advantages", "dynamic sampling put other groups in place")
    elif changed := _unequal(a["advantages"], b["advantages"]):
        first, second = a["advantages"][changed[0]], b["advantages"][changed[0]]
        what = f"{first} and {second} for completion {changed[0]} of the batch"
        error = _worst(a["advantages"], b["advantages"])
        yield Difference(step, "advantages", what, len(changed), len(a["advantages"]), error)


def _prompts(step: int, a: dict[str, Any], b: dict[str, Any]) -> Difference:
    changed = _unequal(a["prompts"], b["prompts"]) or _unequal(a["rows"], b["rows"])
    place = changed[0]
    rows = [part["rows"][place] if place < len(part["rows"]) else None for part in (a, b)]
    if rows[0] != rows[1]:
        what = f"prompt {place} is row {rows[0]} of the data in one run and row {rows[1]} in the other"
    else:
        named = f"prompt {place}" if rows[0] is None else f"row {rows[0]} of the data (prompt {place})"
        what = f"{named} has other tokens"
    return Difference(step, "prompts", what, len(changed), max(len(a["prompts"]), len(b["prompts"])))


def _place(part: dict[str, Any], entry: int) -> str:
    """The prompt row and the generation of an entry; several completions where entries are blocks."""
    size = math.ceil(part["count"] / max(len(part["completions"]), 1))
    if size > 1:
        return f"one of the completions {entry * size} to {min((entry + 1) * size, part['count']) - 1}"
    prompt, generation = divmod(entry, part["group"])
    rows = part["rows"]
    return f"generation {generation} of " + (f"row {rows[prompt]}" if prompt < len(rows) else f"prompt {prompt}")


def _of_values(step: int, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    names = [name for name in (*_FIRST, *a, *b) if name in a or name in b]
    for name in dict.fromkeys(name for name in names if not name.startswith(_UNCOMPARED)):
        first, second = a.get(name), b.get(name)
        if first != second:
            stage = "optimizer" if name == "learning_rate" else "values"
            yield Difference(step, stage, f"{name} is {first} and {second}", error=_relative(first, second))


def _of_weights(step: int, a: ReadTrail, b: ReadTrail) -> Iterator[Difference]:
    one, other = a.steps[step]["weights"], b.steps[step]["weights"]
    if one.keys() != other.keys():
        yield Difference(step, "weights", "other parameters are trained")
        return
    changed = [group for group in one if one[group][0] != other[group][0]]
    if not changed:
        return
    what, error = f"first in {changed[0]}", math.inf
    # in bitwise mode the steps that are not logged have digests alone: the size is that of the next one which is
    sized = [s for s in a.projected if s >= step and s in b.projected]
    if sized and 0 in a.projected:
        begin, one, other = (trail.steps[s]["weights"] for trail, s in ((a, 0), (a, sized[0]), (b, sized[0])))
        apart, moved = (math.hypot(*(distance(one[g][1], x[g][1]) for g in one)) for x in (other, begin))
        error = apart / moved if moved else math.inf
        what += f", by {apart:.1e} over all weights after step {sized[0]}, {error:.1e} of what training has changed"
    yield Difference(step, "weights", what, len(changed), len(one), error)


def _unequal(a: Sequence[Any], b: Sequence[Any]) -> list[int]:
    absent = object()
    pairs = [(a[i] if i < len(a) else absent, b[i] if i < len(b) else absent) for i in range(max(len(a), len(b)))]
    return [place for place, (one, other) in enumerate(pairs) if one != other]


def _worst(a: Sequence[Any], b: Sequence[Any]) -> float:
    return max((_relative(x, y) for x, y in zip(a, b)), default=math.inf) if len(a) == len(b) else math.inf


def _relative(a: Any, b: Any) -> float:
    if a == b:
        return 0.0
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return math.inf
    return abs(a - b) / max(1.0, abs(a))
