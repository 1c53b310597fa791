"""Packs: several groups in one row without padding, each prompt once and its completions after it.

Differs from a padded batch: a prompt that G completions share is one segment, not G copies. Pure index arithmetic; the
packed forward (forward.forms) runs it. Shapes: B completions, N tokens of the pack, S tokens of completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class PackedGroup:
    """Where a prompt and its completions lie in a pack, as half-open token ranges.

    A completion's tokens see the whole prompt and what comes before them in the same completion.
    """

    prompt: tuple[int, int]
    completions: tuple[tuple[int, int], ...]

    @property
    def answers(self) -> tuple[int, int]:
        """The range of all completions, which follow each other without a gap."""
        return (self.completions[0][0], self.completions[-1][1]) if self.completions else (0, 0)


class PackLayout:
    """The groups of a pack, in token order.

    A plain class: engines that cast a forward's arguments take dataclasses apart and pass copies on (FSDP), and the
    layers of one forward share this object.

    Attributes:
        groups: one for each prompt.
        tokens: length N of the pack.
        counts_N: how often the padded batch would have computed each token.
        readers: the attention layers that have read this layout; none after a forward means the model ignores it.
        calls: what attention has computed of this layout for all layers: masks, arguments of kernels.
    """

    def __init__(self, groups: tuple[PackedGroup, ...], tokens: int, counts_N: tuple[int, ...] = ()) -> None:
        self.groups, self.tokens, self.counts_N = groups, tokens, counts_N
        self.readers: set[object] = set()
        self.calls: dict[object, object] = {}


@dataclass(frozen=True)
class Pack:
    """What the packed forward needs to know about a batch of B completions.

    Attributes:
        layout: where the segments lie.
        source_N: for each token of the pack, its place among the tokens of all rows, each a prompt and its completion.
        positions_N: position of each token in its own sequence.
        predictor_S: for each completion token, in row order, the token of the pack that predicts it.
    """

    layout: PackLayout
    source_N: list[int]
    positions_N: list[int]
    predictor_S: list[int]


def group_runs(same_as_previous: Sequence[bool]) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive rows with one prompt.

    Args:
        same_as_previous: for each row but the first, whether its prompt is that of the row before.
    """
    starts = [0, *(i + 1 for i, same in enumerate(same_as_previous) if not same)]
    return list(zip(starts, [*starts[1:], len(same_as_previous) + 1]))


def build_pack(
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    groups: Sequence[tuple[int, int]],
    keep_last: bool,
    multiple: int = 1,
) -> Pack:
    """Lay rows out as a pack.

    Args:
        prompt_lengths, completion_lengths: tokens of each row, which lie one after the other without padding.
        groups: ranges of rows with one prompt (`group_runs`).
        keep_last: whether the last token of a completion, which predicts nothing, goes through the model; a router's
            statistics count it.
        multiple: the pack is filled up to a multiple of this many tokens, with a prompt that nothing sees.
    """
    starts = [0, *accumulate(map(sum, zip(prompt_lengths, completion_lengths)))]
    source: list[int] = []
    positions: list[int] = []
    counts: list[int] = []
    predictors: list[int] = []
    packed: list[PackedGroup] = []
    for first, stop in groups:
        prompt = prompt_lengths[first]
        begin = len(source)
        source.extend(range(starts[first], starts[first] + prompt))
        positions.extend(range(prompt))
        counts.extend([stop - first] * prompt)
        last_of_prompt, completions = len(source) - 1, []
        for row in range(first, stop):
            length = completion_lengths[row]
            run = length if keep_last else max(length - 1, 0)
            start, first_token = starts[row] + prompt_lengths[row], len(source)
            source.extend(range(start, start + run))
            positions.extend(range(prompt, prompt + run))
            counts.extend([1] * run)
            completions.append((first_token, first_token + run))
            if length:
                predictors.extend([last_of_prompt, *range(first_token, first_token + length - 1)])
        packed.append(PackedGroup((begin, begin + prompt), tuple(completions)))
    fill, end = -len(source) % multiple, len(source)
    if fill:
        source.extend([0] * fill)
        positions.extend(range(fill))
        counts.extend([0] * fill)
        packed.append(PackedGroup((end, end + fill), ()))
    layout = PackLayout(tuple(packed), len(source), tuple(counts))
    return Pack(layout, source, positions, predictors)
