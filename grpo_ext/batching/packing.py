"""Packs: several groups in one row without padding, each prompt once and its completions after it.

Differs from a padded batch: a prompt that G completions share is one segment, not G copies. Pure index arithmetic on
the CPU; the packed forward (forward.forms) runs it. Shapes: B completions, N tokens of the pack, S of completions.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

Range = tuple[int, int]  # half-open, of tokens or rows
# first token (among the tokens of all rows), number of tokens, position of the first, count of each token
_Segment = tuple[int, int, int, int]


@dataclass(frozen=True)
class PackedGroup:
    """The places of a prompt and its completions in a pack, as half-open token ranges."""

    prompt: Range
    completions: tuple[Range, ...]
    lengths: tuple[int, ...] = ()  # tokens of all completions of the group, also those outside the pack

    @property
    def answers(self) -> Range:
        """All completions, which follow each other without a gap."""
        return (self.completions[0][0], self.completions[-1][1]) if self.completions else (0, 0)


class PackLayout:
    """The groups of a pack, in token order; not a dataclass: FSDP copies dataclass arguments."""

    def __init__(self, groups: tuple[PackedGroup, ...], tokens: int) -> None:
        self.groups, self.tokens = groups, tokens  # one for each prompt; length N of the pack
        # tokens of the longest prompt with one of its completions
        self.longest = max(
            g.prompt[1] - g.prompt[0] + max((b - a for a, b in g.completions), default=0) for g in groups
        )
        self.readers: set[object] = set()  # attention layers that read this layout; a model without any ignores it
        self.shared: dict[Hashable, Any] = {}  # made by the first attention layer for all: masks, arguments of kernels
        self.group: Any = None  # the `SequenceGroup` whose members hold a slice of the tokens each


@dataclass(frozen=True)
class Pack:
    """B completions laid out for the packed forward; tensors are int64, on the CPU."""

    layout: PackLayout
    source_N: torch.Tensor  # place of each token among the tokens of all rows (prompt and completion each); -1: filling
    positions_N: torch.Tensor  # position of each token in its own sequence
    counts_N: torch.Tensor  # how often the padded batch would have computed each token
    predictor_S: torch.Tensor  # the token that predicts each completion token, in row order


def group_runs(same_as_previous: Sequence[bool]) -> list[Range]:
    """Half-open ranges of consecutive rows with one prompt; `same_as_previous` is of each row but the first."""
    starts = [0, *(i + 1 for i, same in enumerate(same_as_previous) if not same)]
    return list(zip(starts, [*starts[1:], len(same_as_previous) + 1], strict=True))


def build_pack(
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    groups: Sequence[Range],
    keep_last: bool,
    multiple: int = 1,
    group_lengths: Sequence[tuple[int, ...]] | None = None,
    contexts: Sequence[int] | None = None,
) -> Pack:
    """Lay out rows, which lie one after the other without padding; `group_lengths` as in `TokenRows`.

    `keep_last` runs the last token of a completion too: it predicts nothing, but a router's statistics count it. The
    pack is filled up to a `multiple` of tokens with a prompt that no other token sees. `contexts`: how many tokens of
    each completion, from its first, are not predicted.
    """
    starts = [0, *accumulate(map(sum, zip(prompt_lengths, completion_lengths, strict=True)))]
    segments: list[_Segment] = []
    predictors: list[tuple[int, int]] = []  # first token and number of tokens
    packed: list[PackedGroup] = []
    end = 0
    for first, stop in groups:
        prompt, begin = prompt_lengths[first], end
        segments.append((starts[first], prompt, 0, stop - first))
        end += prompt
        last_of_prompt, completions = end - 1, []
        for row, length in enumerate(completion_lengths[first:stop], first):
            run = length if keep_last else max(length - 1, 0)
            segments.append((starts[row] + prompt_lengths[row], run, prompt, 1))
            context = contexts[row] if contexts else 0
            predictors += [(last_of_prompt, min(length, 1) * (not context))]
            predictors += [(end + max(context - 1, 0), max(length - max(context, 1), 0))]
            completions.append((end, end + run))
            end += run
        lengths = group_lengths[first] if group_lengths else tuple(completion_lengths[first:stop])
        packed.append(PackedGroup((begin, begin + prompt), tuple(completions), lengths))
    if fill := -end % multiple:
        segments.append((0, fill, 0, 0))
        packed.append(PackedGroup((end, end + fill), ()))
    source, length, position, count = torch.tensor(segments).T
    within_N, segment_N = _ranges(length)
    source_N = torch.where(count[segment_N] > 0, source[segment_N] + within_N, -1)
    first_token, tokens = torch.tensor(predictors).T
    within_S, run_S = _ranges(tokens)
    return Pack(
        layout=PackLayout(tuple(packed), end + fill),
        source_N=source_N,
        positions_N=position[segment_N] + within_N,
        counts_N=count[segment_N],
        predictor_S=first_token[run_S] + within_S,
    )


def _ranges(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of each element in its range, and the number of its range."""
    number_N = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return torch.arange(len(number_N)) - starts[number_N], number_N
