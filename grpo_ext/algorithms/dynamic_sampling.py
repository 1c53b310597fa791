"""Dynamic sampling: groups whose rewards are all alike give their place to groups that teach (DAPO, arXiv 2503.14476).

Differs from DAPO's reference code: the batch keeps its size, a round samples as many prompts as places are free, so no
group that teaches is thrown away, and everything that was sampled is counted in the logs. Used between rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence

Source = tuple[int, int]  # round, group in the round


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
        for group, useful in enumerate(groups):
            if useful:
                places[free.pop(0)] = (number, group)
    return places, len(free)
