"""`trail.jsonl` in a run's folder: what every rollout batch and every optimizer step was made of, as short digests.

Two runs that part can be compared in the order in which a step is made: prompts, completions, rewards, advantages,
loss, weights (`grpo-ext diff`). Written by the main process. Digests are of 8 bytes and the same on every machine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..algorithms.digests import PROJECTIONS, WeightDigest, digest, layer_groups
from ..errors import ConfigError
from ..forward.tiled_log_probs import gathered
from ..rollouts.join import Round
from ..rollouts.rounds import ScoredBatch
from ..runtime.collectives import full_tensor
from .log import LineFile, json_lines

TRAIL = "trail.jsonl"
MOST_ENTRIES = 1024  # of a rollout batch's completions; in a larger one an entry stands for several


class Trail:
    """Appends to a run's trail. Before `begin`, and on the other processes, nothing is written."""

    def __init__(self) -> None:
        self._file = LineFile(TRAIL, "trail")

    def begin(self, folder: str | Path, checkpoint: str | None, step: int) -> None:
        """Append to the trail of a folder; lines after the step that a run resumes from are superseded."""
        self._file.begin(folder, checkpoint)
        self._file.append({"begin": step})

    def end(self) -> None:
        self._file.path = None

    @property
    def writes(self) -> bool:
        return self._file.path is not None

    def rollout(self, step: int, sampled_by: int, scored: ScoredBatch) -> None:
        """Note a rollout batch: the first step that trains on it, from 1, and the step whose weights sampled it."""
        if not self.writes:
            return
        with self._file.failing():
            line = {
                "rollout": step,
                "sampled_by": sampled_by,
                "rounds": [_round(part, scored.settings.functions.names) for part in scored.rounds],
                "chosen": None if scored.chosen is None else blocks(scored.chosen),
                "advantages": blocks([_advantage(row) for row in scored.batch["advantages"]]),
            }
            self._file.append(line)

    def step(self, step: int, values: Mapping[str, Any], weights: Mapping[str, Any] | None) -> None:
        """Note an optimizer step: its values, and where they are due the digests of the weights after it."""
        self._file.append({"step": step, "values": values} | ({} if weights is None else {"weights": weights}))


def digests_of(model: torch.nn.Module, here: bool, projects: bool) -> dict[str, Any]:
    """The digest in hex of the trained weights and their projections, by group of layers, where `here` is true.

    A collective under FSDP and ZeRO-3, which gather one parameter after the other.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[str, WeightDigest] = {}
    for name, group in layer_groups(trained).items():
        with gathered(trained[name]):
            values = full_tensor(trained[name].detach())
            if here:
                one = found.setdefault(group, WeightDigest() if projects else WeightDigest(projections=None))
                one.add(name, values)
    return {group: one.as_list() for group, one in found.items()}


def _advantage(row: torch.Tensor) -> float:
    """An advantage; of those of tokens a sum with a factor for each place, whose difference has a size."""
    if row.dim() == 0 or not row.isfinite().all():
        return float(row.sum())
    factors = 1 + 1 / torch.arange(1, len(row) + 1, dtype=torch.float64)
    return math.fsum((row.double().cpu() * factors).tolist())  # the same on every machine; padding adds nothing


def _round(part: Round, functions: Sequence[str]) -> dict[str, Any]:
    batch = part.batch
    # a user's override may return rows with padding, which depends on the layout
    prompts = [digest(row) for row in batch.prompts]
    pairs = zip(batch.completions, batch.completion_masks, strict=True)
    completions = [digest(row, mask) for row, mask in pairs]
    for place, entry in enumerate(part.entries[: len(completions)]):
        completions[place] = entry.masked_out or completions[place]
    names = [f"{n} ({k})" if (k := functions[:i].count(n)) else n for i, n in enumerate(functions)]  # different ones
    rewards = {name: part.rewards_BF[:, number].tolist() for number, name in enumerate(names)}
    return {
        "count": len(batch),
        "rows": blocks(part.request.row_numbers),
        "group": part.request.num_generations,
        "prompts": blocks(prompts[:: part.request.num_generations]),
        "completions": blocks(completions),
        "lengths": blocks(batch.completions.lengths),
        "rewards": {name: blocks(values) for name, values in rewards.items()},
    }


def blocks(values: Sequence[Any]) -> list[Any]:
    """At most `MOST_ENTRIES` entries; of more values an entry is the sum of neighbours (floats), or their digest."""
    size = math.ceil(len(values) / MOST_ENTRIES)
    if size <= 1:
        return list(values)
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return [math.fsum(part) if isinstance(part[0], float) else digest(*map(repr, part)) for part in parts]


@dataclass
class ReadTrail:
    """A trail without the lines that a later start supersedes; steps are counted from 1."""

    rollouts: dict[int, dict[str, Any]] = field(default_factory=dict)  # by the first step that trains on it
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def projected(self) -> list[int]:
        """Steps, and 0 for the start, after which the projections of the weights are known."""
        known = ((step, line.get("weights") or {}) for step, line in self.steps.items())
        return sorted(step for step, weights in known if weights and all(part for _, part in weights.values()))


def read_trail(path: str | Path) -> ReadTrail:
    """The trail of a run, which may still be running; a ConfigError for a line that was damaged by hand."""
    trail = ReadTrail()
    for number, line in json_lines(path):
        if not _whole(line):
            raise ConfigError(f"{path}: line {number} is not as it was written. Restore the file, or remove the line.")
        if "begin" in line:
            kept = range(line["begin"] + 1) if line["begin"] else ()  # the weights at the start too
            trail.steps = {step: one for step, one in trail.steps.items() if step in kept}
            trail.rollouts = {step: one for step, one in trail.rollouts.items() if step in kept}
        elif "rollout" in line:
            trail.rollouts[line["rollout"]] = line
        else:
            trail.steps[line["step"]] = line
    return trail


def _whole(line: Any) -> bool:
    """Whether a line has what is read of it."""

    def has(part: Any, **kinds: Any) -> bool:
        return isinstance(part, dict) and all(isinstance(part.get(name), kind) for name, kind in kinds.items())

    if has(line, rollout=int, rounds=list, advantages=list):
        part = {"count": int, "group": int, "rewards": dict, "rows": list, "prompts": list, "completions": list}
        return all(has(one, **part) and one["group"] > 0 for one in line["rounds"])
    if has(line, step=int, values=dict):
        weights = line.get("weights", {})
        lists = has(weights) and all(isinstance(part, list) and len(part) == 2 for part in weights.values())
        return lists and all(part is None or len(part) == PROJECTIONS for _, part in weights.values())
    return has(line, begin=int)
