"""Compares two trails in the order in which a step is made: prompts, completions, rewards, advantages, loss, weights.

The runs themselves, with settings, versions and the likely cause of a difference, are compared in run.diff.
"""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

from ..errors import counted
from .record import Line, Record, finite
from .rounding import ADAM_STEP, LEAST, ROUNDING, is_number, relative

Verdict = Literal["same bits", "rounding", "few tokens", "different"]
SAME: dict[Verdict, str] = {"same bits": "the same bits", "rounding": "the same up to rounding"}
_SENTENCES: dict[Verdict, str] = {
    "same bits": "The runs have the same bits.",
    "rounding": "The runs are the same up to rounding.",
    "few tokens": "The runs are the same until step {0.step}, where {0.count} of {0.of} completions changed.",
    "different": "The runs are different, from step {0.step} on.",
}
# timings, the layout, diagnostics of the sampler, and how many completions run
_UNCOMPARED = ("time/", "layout/", "step_time", "sampling/", "counts/run")
_OF_RUN = ("entropy", "clip_ratio/", "cispo_clip_ratio")  # over the completions that run
_FIRST = ("learning_rate", "loss", "grad_norm")  # the values that are compared before all others


@dataclass(frozen=True)
class Difference:
    """The first difference of a stage at a step."""

    step: int
    stage: str  # prompts, completions, rewards, advantages, optimizer, values or weights
    what: str  # where, and by how much
    count: int = 1  # how many entries differ
    of: int = 1
    error: float = math.inf  # relative; infinite where a difference cannot be rounding


@dataclass
class Comparison:
    """How two runs compare; `first` is None where nothing differs by more than rounding."""

    verdict: Verdict
    steps: int  # that both have
    first: Difference | None = None
    meaning: str = ""
    largest: dict[str, float] = field(default_factory=dict)  # the largest difference that is rounding, by stage
    begins: Difference | None = None  # the first that is rounding
    changed_completions: dict[int, float] = field(default_factory=dict)  # share that differs, by step
    missing: list[str] = field(default_factory=list)  # what a trail lacks, so that it was not compared
    notes: list[str] = field(default_factory=list)  # what differs besides the trails
    weights_known: int = -1  # the last step before the first difference after which weights were compared; -1: none

    @property
    def sizes(self) -> str:
        """The largest differences that are rounding."""
        return ", ".join(f"{stage} {error:.1e}" for stage, error in self.largest.items() if error) or "0"

    @property
    def text(self) -> str:
        first, begins = self.first, self.begins
        lines = [_SENTENCES[self.verdict].format(first), *self.missing]
        if first is not None:
            lines += [f"{first.stage}: {first.what}", self.meaning]
        elif begins is not None:
            lines += [f"Rounding begins at step {begins.step}, {begins.stage}: {begins.what}. Largest: {self.sizes}."]
        if shares := [f"{share:.0%} at step {step}" for step, share in sorted(self.changed_completions.items())]:
            lines.append("Completions that differ: " + ", ".join(dict.fromkeys((shares[0], shares[-1]))) + ".")
        return "\n".join([*lines, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        return {**finite(dataclasses.asdict(self)), "text": self.text}


def compare_trails(a: Record, b: Record, half: bool) -> Comparison:
    """Compare the steps that both have, in the order in which they are made."""
    steps = sorted({*a.trained} & {*b.trained})
    comparison = Comparison("same bits", len(steps), missing=[*_lacks("A", a), *_lacks("B", b)])
    logged = [{name for step in steps for name in trail.steps[step]["values"]} for trail in (a, b)]
    for run, names in (("A", logged[0] - logged[1]), ("B", logged[1] - logged[0])):
        if only := sorted(name for name in names if not name.startswith(_UNCOMPARED)):
            comparison.notes.append(f"Only {run} logs {', '.join(only)}.")
    origin = min((a, b), key=lambda trail: min(trail.weighed, default=math.inf))
    begin = min(origin.weighed, default=0)  # what training has changed is measured from there
    start = origin.steps[begin]["weights"] if origin.weighed else {}
    sized = sorted(step for step in {*a.weighed} & {*b.weighed} if step > begin)
    starts = [trail.steps.get(0, {}).get("weights") for trail in (a, b)]
    if None not in starts:
        comparison.weights_known = 0
        # projections of the same weights round otherwise on other machines and in other versions
        one, other = ({group: digest for group, (digest, _) in start.items()} for start in starts if start is not None)
        if one != other:
            comparison.first, comparison.verdict = Difference(0, "weights", "those at the start differ"), "different"
    gradient = 0.0  # the largest norm so far
    for step in steps:
        norms = [trail.steps[step]["values"].get("grad_norm") for trail in (a, b)]
        gradient = max([gradient, *(norm if is_number(norm) else math.inf for norm in norms)])
        still = gradient <= LEAST["grad_norm"] * ROUNDING["values"][half]  # all gradients are rounding
        for difference in _of_step(step, a, b, start, sized, still):
            stage, error = difference.stage, difference.error
            if stage == "completions":
                comparison.changed_completions[step] = difference.count / difference.of
            if comparison.first is not None:
                continue
            bounds = "first values" if step == 1 and stage == "values" else stage
            if error <= ROUNDING.get(bounds, (0.0, 0.0))[half]:
                comparison.verdict, comparison.begins = "rounding", comparison.begins or difference
                comparison.largest[stage] = max(comparison.largest.get(stage, 0.0), error)
            else:
                comparison.first, comparison.verdict = difference, "different"
        if comparison.first is None and "weights" in a.steps[step] and "weights" in b.steps[step]:
            comparison.weights_known = step
    return comparison


def _lacks(name: str, trail: Record) -> Iterator[str]:
    """What a trail lacks."""
    steps = trail.trained
    if steps and steps[0] > 1:
        yield f"{name} has no trail before step {steps[0]}, so only later steps were compared."
    if steps and (gaps := sorted({*range(steps[0], steps[-1])}.difference(steps))):
        yield f"{name} lacks {counted(len(gaps), 'step')} in between, the first is {gaps[0]}; they were not compared."
    if steps and trail.starts and not trail.starts[-1].get("trail", True):
        yield f"{name} has no trail after step {steps[-1]} (trail=False), so only earlier steps were compared."


def _of_step(step: int, a: Record, b: Record, start: Line, sized: list[int], still: bool) -> Iterator[Difference]:
    """The differences of a step, in the order of its stages."""
    one, other = a.rollouts.get(step), b.rollouts.get(step)
    if one is not None and other is not None:
        yield from _of_rollout(step, one, other)
    elif one is not other and step - 1 in a.steps and step - 1 in b.steps:  # no rollout batch goes on from before
        yield Difference(step, "prompts", f"only {'A' if other is None else 'B'} has a rollout batch that begins here")
    yield from _of_values(step, a.steps[step]["values"], b.steps[step]["values"])
    if "weights" in a.steps[step] and "weights" in b.steps[step]:
        yield from _of_weights(step, a, b, start, sized, still)


def _of_rollout(step: int, a: Line, b: Line) -> Iterator[Difference]:
    for one, other in zip(a["rounds"], b["rounds"], strict=False):
        for kind in ("rows", "prompts"):
            if changed := _unequal(one[kind], other[kind]):
                yield _listed(step, "prompts", _prompt(one, other, min(changed)), changed, one[kind])
                return
        if changed := _unequal(one["completions"], other["completions"]):
            what = f"{_place(one, min(changed))} has other tokens"
            yield _listed(step, "completions", what, changed, one["completions"])
            return
        for name in dict.fromkeys([*one["rewards"], *other["rewards"]]):
            values = one["rewards"].get(name), other["rewards"].get(name)
            if values[0] is None or values[1] is None:
                yield Difference(step, "rewards", f"only one of the runs has the reward {name!r}")
            elif changed := _unequal(*values):
                place = min(changed)
                what = f"{name} gave {both(*changed[place])} for {_place(one, place)}, the same completion"
                error = max(_of_spread(one, *values, place) for place in changed)
                yield Difference(step, "rewards", what, len(changed), len(values[0]), error)
    if len(a["rounds"]) != len(b["rounds"]):
        yield Difference(step, "completions", f"dynamic sampling took {len(a['rounds'])} and {len(b['rounds'])} rounds")
    elif a.get("chosen") != b.get("chosen"):
        yield Difference(step, "advantages", "dynamic sampling put other groups in place")
    elif changed := _unequal(a["advantages"], b["advantages"]):
        place = min(changed)
        where = _place(a["rounds"][0], place) if a.get("chosen") is None else f"entry {place} of the batch"
        yield _listed(step, "advantages", f"{both(*changed[place])} for {where}", changed, a["advantages"])


def _prompt(a: Line, b: Line, entry: int) -> str:
    rows = [part["rows"][entry] if entry < len(part["rows"]) else None for part in (a, b)]
    if any(isinstance(row, str) for row in rows):  # entries that stand for several prompts
        return f"one of the prompts of entry {entry} is another"
    if rows[0] != rows[1]:
        return f"prompt {entry} is row {rows[0]} of the data in one run and row {rows[1]} in the other"
    place = f"prompt {entry}" if rows[0] is None else f"row {rows[0]} of the data (prompt {entry})"
    return f"{place} has other tokens"


def _place(part: Line, entry: int) -> str:
    """The prompt row and the generation of an entry; a range of completions where an entry stands for several."""
    size = math.ceil(part["count"] / max(len(part["completions"]), 1))
    if size > 1:
        return f"one of the completions {entry * size} to {min((entry + 1) * size, part['count']) - 1}"
    prompt, generation = divmod(entry, part["group"])
    rows = part["rows"]
    return f"generation {generation} of " + (f"row {rows[prompt]}" if prompt < len(rows) else f"prompt {prompt}")


def _of_values(step: int, a: Line, b: Line) -> Iterator[Difference]:
    # an override of the loss, or skip_zero_contribution=False, also runs completions that contribute nothing
    uncompared = _UNCOMPARED if a.get("counts/run") == b.get("counts/run") else (*_UNCOMPARED, *_OF_RUN)
    for name in dict.fromkeys(n for n in (*_FIRST, *a) if n in a and n in b and not n.startswith(uncompared)):
        if a[name] != b[name]:
            stage = "optimizer" if name == "learning_rate" else "values"
            error = relative(a[name], b[name], LEAST.get(name, 1.0))
            yield Difference(step, stage, f"{name} is {both(a[name], b[name])}", error=error)


def _of_spread(part: Line, a: Sequence[Any], b: Sequence[Any], entry: int) -> float:
    """The difference of two rewards relative to the range of their group, or of all where an entry is a sum."""
    size = part["group"] if len(a) == part["count"] else len(a)
    start = entry // size * size
    groups = [[value for value in rewards[start : start + size] if is_number(value)] for rewards in (a, b)]
    spread = max((max(group) - min(group) for group in groups if group), default=0.0)
    one, other = (rewards[entry] if entry < len(rewards) else None for rewards in (a, b))
    error = relative(one, other, least=0.0)
    if not spread or not is_number(one) or not is_number(other):
        return error
    return abs(one - other) / spread


def _of_weights(step: int, a: Record, b: Record, start: Line, sized: list[int], still: bool) -> Iterator[Difference]:
    one, other = a.steps[step]["weights"], b.steps[step]["weights"]
    if one.keys() != other.keys():
        yield Difference(step, "weights", "other parameters are trained")
        return
    if not (changed := [group for group in one if one[group][0] != other[group][0]]):
        return
    what, error = f"first in {changed[0]}", math.inf
    # at the first step of both there is nothing yet that training has changed: see the next one
    place = bisect_left(sized, step)
    if place < len(sized):
        end = sized[place]
        one, other = a.steps[end]["weights"], b.steps[end]["weights"]
        apart, moved = (math.hypot(*(distance(one[g][1], x[g][1]) for g in one if g in x)) for x in (other, start))
        error = apart / moved if moved else math.inf
        what += f", by about {apart:.1e} over all weights after step {end}, {error:.1e} of what training has changed"
        if still:  # of such gradients Adam makes steps of any size, up to its largest
            error = 0.0 if apart <= _reach(a, end) + _reach(b, end) else math.inf
    yield Difference(step, "weights", what, len(changed), len(one), error)


def _reach(record: Record, last: int) -> float:
    """How far the optimizer can have moved the weights until a step; infinite where the record does not say."""
    start = record.start_of(last) if record.starts else {}
    if (trained := start.get("trained_parameters")) is None:
        return math.inf
    sgd, total = "sgd" in str((start.get("settings") or {}).get("optim")), 0.0
    for line in (line for step, line in record.steps.items() if 0 < step <= last):
        rate, norm = line["values"].get("learning_rate"), line["values"].get("grad_norm")
        if not is_number(rate) or (sgd and not is_number(norm)):
            return math.inf
        total += abs(rate) * (norm if sgd else ADAM_STEP * math.sqrt(trained))
    return total


def distance(one: Sequence[Any], other: Sequence[Any]) -> float:
    """An estimate of the distance of two sets of weights from their projections; infinite where one is not finite."""
    return math.inf if None in one or None in other else math.dist(one, other) / math.sqrt(len(one))


def _unequal(a: Sequence[Any], b: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    """The pairs of two lists that differ, by their place; what one of them lacks is "nothing"."""
    pairs = enumerate(zip_longest(a, b, fillvalue="nothing"))
    return {place: pair for place, pair in pairs if pair[0] != pair[1]}


def _listed(step: int, stage: str, what: str, changed: dict[int, tuple[Any, Any]], of: Sequence[Any]) -> Difference:
    """A difference of lists: as large as that of the two values that are furthest apart."""
    error = max(relative(*pair) for pair in changed.values()) if stage in ROUNDING else math.inf
    return Difference(step, stage, what, len(changed), len(of), error)


def both(a: Any, b: Any, between: str = " and ") -> str:
    """Two values, with as many digits as tell them apart."""
    texts = [[f"{v:.{digits}g}" if isinstance(v, float) else str(v) for v in (a, b)] for digits in range(4, 18)]
    return between.join(next((text for text in texts if text[0] != text[1]), texts[0]))
