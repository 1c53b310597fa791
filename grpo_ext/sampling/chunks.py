"""Generation by canonical chunks: the rows of one process, cut by global order, over several turns.

Differs from TRL, which generates for all rows of a process at once: a chunk has the same shapes wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batching.prompt_order import RolloutRequest
from ..errors import RolloutError


class RowTokens(list[int]):
    """Token ids that were sampled for a row of this process; what is put before and after them stays of that row.

    TRL goes on with the rows whose tools have answered and does not say which: it passes the tokens of the prompt, of
    the completion and of the answers, added up. Tokens alone do not tell either: rows may say the same, and be answered
    differently.
    """

    def __init__(self, row: int, ids: Iterable[int]) -> None:
        super().__init__(ids)
        self.row = row

    def __add__(self, after: Any) -> RowTokens:  # type: ignore[override]
        return RowTokens(self.row, [*self, *after])

    def __radd__(self, before: Any) -> RowTokens:
        return RowTokens(self.row, [*before, *self])


def rows_continued(prompt_ids: Sequence[Sequence[int]]) -> list[int]:
    """Which row of this process each sequence of a later turn belongs to.

    Raises:
        RolloutError: a sequence does not begin with what was sampled for a row.
    """
    rows = [getattr(ids, "row", None) for ids in prompt_ids]
    if None in rows:
        raise RolloutError(
            f"a later turn goes on with token ids that are not known to belong to a row (place {rows.index(None)} of "
            f"{len(rows)}); an override of _generate_single_turn or _tool_call_loop has to pass on the lists of token "
            "ids that it gets, not copies of them."
        )
    return rows  # type: ignore[return-value]


@dataclass(frozen=True)
class ChunkedGeneration:
    """Samples the rows of one process, chunk by chunk; later turns keep the chunks of the first.

    Attributes:
        keys_B: key of every row of this process.
        chunk_size: completions per chunk, in whole groups.
        calls: from this process's number of chunks to the number of `generate` calls it has to make.
        alike: prompts of a call have one length, so that there is no padding.
    """

    request: RolloutRequest
    keys_B: torch.Tensor
    chunk_size: int
    calls: Callable[[int], int]
    alike: bool = False

    def plan(self, prompt_ids: Sequence[Sequence[int]], rows: list[int]) -> ChunkPlan:
        """What to call `generate` for; a collective where that is one.

        Args:
            prompt_ids: token ids so far of each of `rows`.
        """
        group = self.request.num_generations
        parts = rows_by_chunk(rows, max(1, self.chunk_size // group) * group)
        if self.alike:
            parts = [piece for part in parts for piece in by_length(part, prompt_ids)]
        own = 0 if self.request.empty else len(parts)
        return ChunkPlan(parts, own, self.calls(own))


@dataclass(frozen=True)
class ChunkPlan:
    """The calls of `generate` of one turn.

    Attributes:
        parts: positions of the rows of each chunk, among those of the turn.
        own: chunks whose tokens count; none on a process without prompts.
        calls: the number of calls; those beyond `own` keep other processes company.
    """

    parts: list[list[int]]
    own: int
    calls: int

    def run(self, sample: Callable[[list[int]], list[list[int]]], filler: int) -> list[list[int]]:
        """New token ids of each row, from a function of the positions that make a chunk; `filler` where none count."""
        parts, own = self.parts, self.own
        result: list[list[int]] = [[filler] for part in parts for _ in part]
        for call in range(self.calls):
            part = parts[call % len(parts)]
            tokens = sample(part)
            if call < own:
                for i, row in zip(part, tokens):
                    result[i] = row
        return result


def rows_by_chunk(rows: list[int], chunk: int) -> list[list[int]]:
    """Positions in `rows` of the rows of each chunk, so that later turns keep the chunks of the first."""
    parts: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        parts.setdefault(row // chunk, []).append(i)
    return [parts[c] for c in sorted(parts)]


def by_length(rows: list[int], prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """The rows in parts whose prompts have as many tokens; shortest first, rows in order."""
    parts: dict[int, list[int]] = {}
    for row in rows:
        parts.setdefault(len(prompt_ids[row]), []).append(row)
    return [parts[length] for length in sorted(parts)]
