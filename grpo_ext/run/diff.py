"""`grpo-ext diff`: at which step and stage two runs diverge, by how much, and what that means.

Compares settings, versions and machines from `log.jsonl`, then the trails (`run.trail`) in the order of a step.
"""

import dataclasses
import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import pandas

from ..algorithms.digests import distance
from ..errors import ConfigError
from .fingerprint import LAYOUT_SIZES, differences
from .log import LOG, read_log
from .trail import TRAIL, ReadTrail, read_trail

Verdict = Literal["same bits", "rounding", "few tokens", "different"]
SAME: dict[Verdict, str] = {"same bits": "the same bits", "rounding": "the same up to rounding"}
Changes = list[tuple[str, Any, Any]]  # name, both values
_SENTENCES: dict[Verdict, str] = {
    "same bits": "The runs have the same bits.",
    "rounding": "The runs are the same up to rounding.",
    "few tokens": "The runs are the same until step {0.step}, where {0.count} of {0.of} completions changed.",
    "different": "The runs are different, from step {0.step} on.",
}
# the largest relative differences that count as rounding, in float32 and in half precision
_LIMITS = {
    "rewards": (1e-6, 1e-6),
    "advantages": (1e-4, 5e-2),
    "optimizer": (1e-6, 1e-6),
    "values": (1e-4, 5e-2),
    "weights": (1e-2, 0.5),  # of what training has changed
}
# timings, the layout, diagnostics of the sampler, and how many completions run
_UNCOMPARED = ("time/", "layout/", "step_time", "sampling/", "counts/run")
_OF_RUN = ("entropy", "clip_ratio/", "cispo_clip_ratio")  # over the completions that run
_FIRST = ("learning_rate", "loss", "grad_norm")  # the values that are compared before all others
# differences are relative to the larger value, which is taken as at least this; 1 for others, whose terms may cancel
_LEAST = {"grad_norm": 1e-2, "kl": 1e-2, "entropy": 1e-2, "learning_rate": 1e-12}
_SETTINGS = {  # that decide a stage; all others decide the loss
    "prompts": ("seed", "data_seed", "data", "tokenizer", "num_generations", "rollout_batch_size", "num_iterations"),
    "completions": (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "max_completion_length"),
        *("num_generations", "rollout_chunk_size", "seed", "rollout_lag", "mask_truncated_completions"),
        *("dynamic_sampling", "dynamic_sampling_max_rounds"),
    ),
    "advantages": ("scale_rewards", "advantage_estimator", "reward_weights", "multi_objective_aggregation"),
    "optimizer": (
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs"),
    ),
    "weights": ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args", "max_grad_norm"),
}
_MEANINGS = {  # of a first difference, and its cause where no setting differs
    "prompts": ("The runs have different prompts. What decides them", "the data set, its order, or the chat template"),
    "completions": ("Sampling has other settings", ""),
    "rewards": ("The completions are the same. The cause", "a reward function that changed, or is not deterministic"),
    "advantages": ("The rewards are the same, so advantages are computed differently", "an override"),
    "values": ("Advantages are the same, so the loss is computed differently", "an override, or a fault of a layout"),
    "optimizer": ("The learning rate follows another schedule", "a callback, or a scheduler of another length"),
    "weights": ("The gradient is the same, so the optimizer differs", "its state, or what else changed the weights"),
}


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
    weights_known: int = -1  # the last step before the first difference whose weights were compared

    @property
    def text(self) -> str:
        first, begins = self.first, self.begins
        lines = [_SENTENCES[self.verdict].format(first), *self.missing]
        sizes = ", ".join(f"{stage} {error:.1e}" for stage, error in self.largest.items() if error)
        if first is not None:
            lines += [f"{first.stage}: {first.what}", self.meaning]
        elif begins is not None:
            lines += [f"Rounding begins at step {begins.step}, {begins.stage}: {begins.what}. Largest: {sizes or 0}."]
        if shares := [f"{share:.0%} at step {step}" for step, share in sorted(self.changed_completions.items())]:
            lines.append("Completions that differ: " + ", ".join(dict.fromkeys((shares[0], shares[-1]))) + ".")
        return "\n".join([*lines, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        plain = json.dumps(dataclasses.asdict(self))
        return {**json.loads(plain, parse_constant=lambda name: None), "text": self.text}  # no Infinity in JSON


@dataclass(frozen=True)
class RunOnDisk:
    folder: Path
    start: Mapping[str, Any]  # of its last training call, from the log
    trail: ReadTrail

    @property
    def settings(self) -> dict[str, Any]:
        """What the run means: settings, data, model, rewards."""
        parts = ("data", "model", "tokenizer", "end_tokens", "rewards", "tools")
        return dict(self.start.get("settings") or {}) | {name: self.start.get(name) for name in parts}

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
        raise ConfigError("the runs have no step in common; at least one of them has not trained a step yet.")
    if (first := comparison.first) is not None:
        uncertain = bool(comparison.largest) or a.half or b.half or bool(besides)
        few = first.stage == "completions" and first.of > 1 and first.count * 2 <= first.of
        if uncertain and few and not _among(settings, (*_SETTINGS["completions"], *_SETTINGS["weights"])):
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
            yield f"The texts part at character {place}: {one[place:][:20]!r} and {other[place:][:20]!r}."


def _rewards(*folders: Path) -> Iterator[str]:
    """The logged rewards of both at up to 8 of their common steps."""
    logs = [read_log(folder / LOG).entries for folder in folders]
    one, other = ({e["step"]: e["values"]["reward"] for e in log if "reward" in e["values"]} for log in logs)
    steps = sorted(one.keys() & other.keys())
    if shown := [f"step {s}: {_both(one[s], other[s])}" for s in steps[:: math.ceil(len(steps) / 8) or 1]]:
        yield f"Rewards of A and B: {'; '.join(shown)}."


def changes(a: dict[str, Any], b: dict[str, Any]) -> Changes:
    pairs = differences({name: (a.get(name), b.get(name)) for name in {**a, **b}})
    return [change for change in pairs if change[1] != change[2]]


def listed(changes: Changes) -> str:
    shown = [f"{name} {old!r} -> {new!r}" for name, old, new in changes[:12]]
    shown += [f"and {len(changes) - 12} more"] if len(changes) > 12 else []
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", "; ".join(shown))  # the beginnings of hashes


def _among(changes: Changes, names: Sequence[str]) -> list[str]:
    return [name for name, _, _ in changes if name.split(".")[0] in names]


def _meaning(comparison: Comparison, first: Difference, settings: Changes, besides: Changes) -> str:
    """A sentence on the likely cause of the first difference."""
    if first.step == 0:
        return "The runs begin with different weights: another model or adapter, or a trainer that had trained before."
    optimizer = _among(settings, _SETTINGS["weights"])
    if optimizer and "weights" in comparison.largest and first.stage in ("completions", "values"):
        return f"The weights had begun to differ, and the optimizer has other settings: {', '.join(optimizer)}."
    others = {name for names in _SETTINGS.values() for name in names}
    known = _among(settings, _SETTINGS.get(first.stage, ()))
    if first.stage == "values":
        known = [name for name, _, _ in settings if name.split(".")[0] not in others]
    if first.stage == "completions" and not known:
        last, alike = comparison.weights_known, SAME["rounding" if comparison.largest else "same bits"]
        weights = f"The weights were {alike} after step {last}, when they were last compared. " if last >= 0 else ""
        causes = [name for name, _, _ in besides] or ["the sampler itself (an override, an engine), or other kernels"]
        return f"{weights}What may have sampled differently: {', '.join(causes)}."
    return f"{_MEANINGS[first.stage][0]}: {', '.join(known or _MEANINGS[first.stage][1:])}."


def compare_trails(a: ReadTrail, b: ReadTrail, half: bool, exact: bool = False) -> Comparison:
    """Compare the steps that both have, in the order in which they are made; `exact`: no difference is rounding."""
    steps = sorted((a.steps.keys() & b.steps.keys()) - {0})
    comparison = Comparison("same bits", len(steps), missing=[*_lacks("A", a), *_lacks("B", b)])
    logged = [{name for step in steps for name in trail.steps[step]["values"]} for trail in (a, b)]
    for run, names in (("A", logged[0] - logged[1]), ("B", logged[1] - logged[0])):
        if only := sorted(name for name in names if not name.startswith(_UNCOMPARED)):
            comparison.notes.append(f"Only {run} logs {', '.join(only)}.")
    origin = min((a, b), key=lambda trail: min(trail.projected, default=math.inf))
    begin = min(origin.projected, default=0)  # what training has changed is measured from there
    start = origin.steps[begin]["weights"] if origin.projected else {}
    sized = sorted(step for step in {*a.projected} & {*b.projected} if step > begin)
    starts = [trail.steps.get(0, {}).get("weights") for trail in (a, b)]
    if None not in starts and starts[0] != starts[1]:
        comparison.first, comparison.verdict = Difference(0, "weights", "those at the start differ"), "different"
    gradient = 0.0  # the largest norm so far
    for step in steps:
        norms = [trail.steps[step]["values"].get("grad_norm") for trail in (a, b)]
        gradient = max([gradient, *(norm if isinstance(norm, int | float) else math.inf for norm in norms)])
        for difference in _of_step(step, a, b, start, sized):
            stage, error = difference.stage, difference.error
            if stage == "completions":
                comparison.changed_completions[step] = difference.count / difference.of
            if comparison.first is not None:
                continue
            if stage == "weights" and gradient <= _LEAST["grad_norm"] * _LIMITS["values"][half]:
                error = 0.0  # the gradients are rounding, of which Adam makes steps of any size
            if error <= _LIMITS.get(stage, (0.0, 0.0))[half] and not exact:
                comparison.verdict, comparison.begins = "rounding", comparison.begins or difference
                comparison.largest[stage] = max(comparison.largest.get(stage, 0.0), error)
            else:
                comparison.first, comparison.verdict = difference, "different"
        if comparison.first is None and "weights" in a.steps[step] and "weights" in b.steps[step]:
            comparison.weights_known = step
    return comparison


def _lacks(name: str, trail: ReadTrail) -> Iterator[str]:
    """What a trail has not of the steps before its last."""
    steps = sorted(trail.steps.keys() - {0})
    if steps and steps[0] > 1:
        yield f"{name} has no trail before step {steps[0]}, so only later steps were compared."
    if steps and (gaps := sorted({*range(steps[0], steps[-1])}.difference(steps))):
        yield f"{name} lacks {len(gaps)} step(s) in between, the first is {gaps[0]}; they were not compared."


def _of_step(step: int, a: ReadTrail, b: ReadTrail, start: dict[str, Any], sized: list[int]) -> Iterator[Difference]:
    """The differences of a step, in the order of its stages."""
    one, other = a.rollouts.get(step), b.rollouts.get(step)
    if one is not None and other is not None:
        yield from _of_rollout(step, one, other)
    elif one is not other and step - 1 in a.steps and step - 1 in b.steps:  # no rollout batch goes on from before
        yield Difference(step, "prompts", f"only {'A' if other is None else 'B'} has a rollout batch that begins here")
    yield from _of_values(step, a.steps[step]["values"], b.steps[step]["values"])
    if "weights" in a.steps[step] and "weights" in b.steps[step]:
        yield from _of_weights(step, a, b, start, sized)


def _of_rollout(step: int, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
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
                what = f"{name} gave {_both(*changed[place])} for {_place(one, place)}, the same completion"
                yield _listed(step, "rewards", what, changed, values[0])
    if len(a["rounds"]) != len(b["rounds"]):
        yield Difference(step, "completions", f"dynamic sampling took {len(a['rounds'])} and {len(b['rounds'])} rounds")
    elif a.get("chosen") != b.get("chosen"):
        yield Difference(step, "advantages", "dynamic sampling put other groups in place")
    elif changed := _unequal(a["advantages"], b["advantages"]):
        place = min(changed)
        where = _place(a["rounds"][0], place) if a.get("chosen") is None else f"entry {place} of the batch"
        yield _listed(step, "advantages", f"{_both(*changed[place])} for {where}", changed, a["advantages"])


def _prompt(a: dict[str, Any], b: dict[str, Any], entry: int) -> str:
    rows = [part["rows"][entry] if entry < len(part["rows"]) else None for part in (a, b)]
    if any(isinstance(row, str) for row in rows):  # entries that stand for several prompts
        return f"one of the prompts of entry {entry} is another"
    if rows[0] != rows[1]:
        return f"prompt {entry} is row {rows[0]} of the data in one run and row {rows[1]} in the other"
    place = f"prompt {entry}" if rows[0] is None else f"row {rows[0]} of the data (prompt {entry})"
    return f"{place} has other tokens"


def _place(part: dict[str, Any], entry: int) -> str:
    """The prompt row and the generation of an entry; a range of completions where an entry stands for several."""
    size = math.ceil(part["count"] / max(len(part["completions"]), 1))
    if size > 1:
        return f"one of the completions {entry * size} to {min((entry + 1) * size, part['count']) - 1}"
    prompt, generation = divmod(entry, part["group"])
    rows = part["rows"]
    return f"generation {generation} of " + (f"row {rows[prompt]}" if prompt < len(rows) else f"prompt {prompt}")


def _of_values(step: int, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    # an override of the loss, or skip_zero_contribution=False, also runs completions that contribute nothing
    uncompared = _UNCOMPARED if a.get("counts/run") == b.get("counts/run") else (*_UNCOMPARED, *_OF_RUN)
    for name in dict.fromkeys(n for n in (*_FIRST, *a) if n in a and n in b and not n.startswith(uncompared)):
        if a[name] != b[name]:
            stage = "optimizer" if name == "learning_rate" else "values"
            error = relative(a[name], b[name], _LEAST.get(name, 1.0))
            yield Difference(step, stage, f"{name} is {_both(a[name], b[name])}", error=error)


def _of_weights(step: int, a: ReadTrail, b: ReadTrail, start: dict[str, Any], sized: list[int]) -> Iterator[Difference]:
    one, other = a.steps[step]["weights"], b.steps[step]["weights"]
    if one.keys() != other.keys():
        yield Difference(step, "weights", "other parameters are trained")
        return
    if not (changed := [group for group in one if one[group][0] != other[group][0]]):
        return
    what, error = f"first in {changed[0]}", math.inf
    # where a step has digests alone (in bitwise mode without a log line), the next one that has more
    place = bisect_left(sized, step)
    if place < len(sized):
        end = sized[place]
        one, other = a.steps[end]["weights"], b.steps[end]["weights"]
        apart, moved = (math.hypot(*(distance(one[g][1], x[g][1]) for g in one if g in x)) for x in (other, start))
        error = apart / moved if moved else math.inf
        what += f", by about {apart:.1e} over all weights after step {end}, {error:.1e} of what training has changed"
    yield Difference(step, "weights", what, len(changed), len(one), error)


def _unequal(a: Sequence[Any], b: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    """The pairs of two lists that differ, by their place; what one of them lacks is "nothing"."""
    pairs = enumerate(zip_longest(a, b, fillvalue="nothing"))
    return {place: pair for place, pair in pairs if pair[0] != pair[1]}


def _listed(step: int, stage: str, what: str, changed: dict[int, tuple[Any, Any]], of: Sequence[Any]) -> Difference:
    """A difference of lists: as large as that of the two values that are furthest apart."""
    error = max(relative(*pair) for pair in changed.values()) if stage in _LIMITS else math.inf
    return Difference(step, stage, what, len(changed), len(of), error)


def _both(a: Any, b: Any) -> str:
    """Two values, with as many digits as tell them apart."""
    texts = [[f"{v:.{digits}g}" if isinstance(v, float) else str(v) for v in (a, b)] for digits in range(4, 18)]
    return " and ".join(next((text for text in texts if text[0] != text[1]), texts[0]))


def relative(a: Any, b: Any, least: float = 1.0) -> float:
    """The difference of two values relative to the larger one, or to `least`; two NaN are equal."""
    if a == b or (a != a and b != b):
        return 0.0
    if not isinstance(a, int | float) or not isinstance(b, int | float) or math.isnan(a) or math.isnan(b):
        return math.inf
    return abs(a - b) / max(least, abs(a), abs(b))
