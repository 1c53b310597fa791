"""Dynamic sampling: groups whose rewards are all alike give their place to groups that teach (DAPO, arXiv 2503.14476).

Differs from DAPO's reference code: the batch keeps its size, a round samples as many prompts as places are free, so no
group that teaches is thrown away, and everything that was sampled is counted in the logs. Used between rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Source = tuple[int, int]  # round, group in the round
_LEAST = {"completions/min_length", "completions/min_terminated_length", "sampling/importance_sampling_ratio/min"}
_MOST = {
    "completions/max_length",
    "completions/max_terminated_length",
    "sampling/importance_sampling_ratio/max",
    "sampling/sampling_logp_difference/max",
}


def fill_places(teaches: Sequence[Sequence[bool]]) -> tuple[list[Source], int]:
    """Which group takes each place of the rollout batch.

    Args:
        teaches: for each round, for each group sampled in it, whether it has variance. The first round has a group for
            every place, a later one at most one for every place that was still free.

    Returns:
        Round and group of each place, and how many places are still free; those keep the group of the first round.
    """
    places: list[Source] = [(0, group) for group in range(len(teaches[0]))]
    free = [place for place, useful in enumerate(teaches[0]) if not useful]
    for number, groups in enumerate(teaches[1:], start=1):
        found = [(number, group) for group, useful in enumerate(groups) if useful]
        for source in found:
            places[free.pop(0)] = source
    return places, len(free)


def combine_metrics(rounds: Sequence[Mapping[str, float]], completions: Sequence[int]) -> dict[str, float]:
    """TRL's log values of one rollout batch from those of its rounds.

    Means are weighted by what they were measured on: completions, completions that ended by themselves, or tool calls.
    Minima and maxima are taken over rounds; `num_tokens`, a counter, keeps its last value. NaN entries do not count.

    Args:
        rounds: log values by name, of each round.
        completions: completions of each round.
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for values in rounds for name in values):
        pairs = [(values[name], _weight(name, values, n)) for values, n in zip(rounds, completions) if name in values]
        known = [(value, weight) for value, weight in pairs if not math.isnan(value) and weight]
        if name == "num_tokens" or not known:
            combined[name] = pairs[-1][0]
        elif name in _LEAST:
            combined[name] = min(value for value, _ in known)
        elif name in _MOST:
            combined[name] = max(value for value, _ in known)
        elif len(known) == 1:
            combined[name] = known[0][0]
        else:
            total = math.fsum(weight for _, weight in known)
            combined[name] = math.fsum(value * weight for value, weight in known) / total
    return combined


def _weight(name: str, values: Mapping[str, float], completions: int) -> float:
    if name.endswith("_terminated_length"):  # 0 where none ended by itself
        return completions * (1.0 - values.get("completions/clipped_ratio", 0.0))
    if name == "tools/failure_frequency":
        return completions * values.get("tools/call_frequency", 1.0)
    return completions
