"""Generation by canonical chunks: the rows of one process, cut by global order, over several turns.

Differs from TRL, which generates for all rows of a process at once: a chunk has the same shapes wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
        RolloutError: a sequence is not made from `RowTokens`.
    """
    rows = [getattr(ids, "row", None) for ids in prompt_ids]
    if None in rows:
        raise RolloutError(
            f"a later turn goes on with token ids that are not known to belong to a row (place {rows.index(None)} of "
            f"{len(rows)}); an override of _generate_single_turn or _tool_call_loop has to pass on the lists of token "
            "ids that it gets, not copies of them."
        )
    return rows  # type: ignore[return-value]


def chunks_of(
    rows: Sequence[int], prompt_ids: Sequence[Sequence[int]], chunk_size: int, equal_lengths: bool = False
) -> list[list[int]]:
    """Positions in `rows` of the rows of each chunk; later turns keep the chunks of the first.

    Args:
        rows: of this process, those that the turn goes on with.
        prompt_ids: token ids so far of each of `rows`.
        chunk_size: completions, in whole groups.
        equal_lengths: cut chunks further, shortest first, so that no row is padded.
    """
    chunks: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(rows):
        chunks.setdefault((row // chunk_size, len(prompt_ids[i]) if equal_lengths else 0), []).append(i)
    return [chunks[key] for key in sorted(chunks)]


def run_chunks(
    chunks: Sequence[list[int]], calls: int, sample: Callable[[list[int]], list[list[int]]]
) -> list[list[int]]:
    """New token ids of each row, from a function of a chunk; none where no call samples its chunk.

    Args:
        calls: of `sample`; those beyond the chunks keep other processes company, and what they return does not count.
    """
    found: list[list[int]] = [[] for chunk in chunks for _ in chunk]
    for number in range(calls):
        chunk = chunks[number % len(chunks)]
        tokens = sample(chunk)
        if number < len(chunks):
            for i, ids in zip(chunk, tokens):
                found[i] = ids
    return found
