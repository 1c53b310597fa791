"""The trail: what every rollout batch and every optimizer step was made of, as short digests for a run's record.

Two runs that part can be compared in the order in which a step is made: prompts, completions, rewards, advantages,
loss, weights (`grpo-ext diff`). Digests are of 8 bytes and the same on every machine.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..algorithms.digests import WeightDigest, digest, layer_groups
from ..forward.columns import CONTEXT_IDS, FURTHER_ROWS
from ..forward.tiled_log_probs import gathered
from ..rollouts.join import Round
from ..rollouts.rounds import ScoredBatch
from ..runtime.collectives import full_tensor
from .record import Line

MOST_ENTRIES = 1024  # of a rollout batch's completions; in a larger one an entry stands for several


def rollout_line(scored: ScoredBatch) -> Line:
    return {
        "rounds": [_round(part, scored.settings.functions.names) for part in scored.rounds],
        "chosen": None if scored.chosen is None else blocks(scored.chosen),
        "advantages": blocks([_advantage(row) for row in scored.batch["advantages"]]),
    }


def digests_of(model: torch.nn.Module, here: bool) -> dict[str, Any]:
    """The digest in hex of the trained weights and their projections, by group of layers, where `here` is true.

    A collective under FSDP and ZeRO-3, which gather one parameter after the other.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[str, WeightDigest] = {}
    for name, group in layer_groups(trained).items():
        with gathered(trained[name]):
            values = full_tensor(trained[name].detach())
            if here:
                found.setdefault(group, WeightDigest()).add(name, values)
    return {group: one.as_list() for group, one in found.items()}


def _advantage(row: torch.Tensor) -> float:
    """An advantage; of those of tokens a sum with a factor for each place, whose difference has a size."""
    if row.dim() == 0 or not row.isfinite().all():
        return float(row.sum())
    factors = 1 + 1 / torch.arange(1, len(row) + 1, dtype=torch.float64)
    return math.fsum((row.double().cpu() * factors).tolist())  # the same on every machine; padding adds nothing


def _round(part: Round, functions: Sequence[str]) -> Line:
    batch = part.batch
    # a user's override may return rows with padding, which depends on the layout
    prompts = [digest(row) for row in batch.prompts]
    columns = [batch.completions, batch.completion_masks]
    if batch.several:
        columns += [batch[FURTHER_ROWS], batch[CONTEXT_IDS]]
    # of a completion with one row the first two alone, whatever others have
    completions = [digest(*row[:2], *(part for part in row[2:] if len(part))) for row in zip(*columns, strict=True)]
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


def rewards_of(rows: Iterable[Any]) -> torch.Tensor:
    """Rewards in a trail as a tensor, NaN where a function returned None."""
    return torch.tensor([[math.nan if value is None else value for value in row] for row in rows])


def origins_of(rollouts: Mapping[int, Line], step: int, size: int) -> tuple[slice, list[Line]]:
    """The prompt's row, the generation and the rewards of each completion of a rollout batch, and which a step trains.

    Empty where the trail sums up. `rollouts` are those of a record, `size` completions are in a step.
    """
    first = max((number for number in rollouts if number <= step), default=0)
    made, line = list[Line](), rollouts.get(first, {"rounds": (), "chosen": None})
    for part in line["rounds"]:
        if part["count"] != len(part["completions"]):
            return slice(0), []
        for place in range(part["count"]):
            prompt, generation = divmod(place, part["group"])
            number = part["rows"][prompt] if prompt < len(part["rows"]) else None
            rewards = {name: values[place] for name, values in part["rewards"].items()}
            made.append({"row": number, "generation": generation, "rewards": rewards})
    batch = made if line["chosen"] is None else [made[place] for place in line["chosen"]]
    start = (step - first) % max(math.ceil(len(batch) / size), 1) * size
    return slice(start, start + size), batch
