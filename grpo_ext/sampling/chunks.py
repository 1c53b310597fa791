"""Generation by canonical chunks: the rows of one process, cut by global order, over several turns.

Differs from TRL, which generates for all rows of a process at once: a chunk has the same shapes wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batching.prompt_order import RolloutRequest


class RowHistories:
    """Finds which row of this process a later turn continues, when tools make TRL generate again for some rows.

    TRL passes the continued rows in order and each extends its own history, so the next row whose history is a prefix
    is the one. Rows with equal histories are exchangeable.
    """

    def __init__(self, prompts: list[list[int]], completions: list[list[int]]) -> None:
        self.prompt_lengths = [len(p) for p in prompts]
        self.histories = [list(p) + list(c) for p, c in zip(prompts, completions)]

    def match(self, continued: list[list[int]]) -> list[int]:
        """Row index of each continued sequence."""
        rows, next_row = [], 0
        for ids in continued:
            while self.histories[next_row] != ids[: len(self.histories[next_row])]:
                next_row += 1
            rows.append(next_row)
            next_row += 1
        return rows

    def offsets(self, rows_B: torch.Tensor, continued: list[list[int]]) -> torch.Tensor:
        """Token position of the next token in the completion of each row, int64 (B,)."""
        return torch.tensor([len(ids) - self.prompt_lengths[row] for row, ids in zip(rows_B.tolist(), continued)])

    def extend(self, rows: list[int], continued: list[list[int]], new: list[list[int]]) -> None:
        """Record what the rows have become."""
        for row, ids, tokens in zip(rows, continued, new):
            self.histories[row] = list(ids) + list(tokens)


@dataclass(frozen=True)
class ChunkedGeneration:
    """Samples the rows of one process, chunk by chunk; later turns keep the chunks of the first.

    Attributes:
        histories: the rows as sampled so far, None in the first turn.
        keys_B: key of every row of this process.
        chunk_size: completions per chunk, in whole groups.
        calls: from this process's number of chunks to the number of `generate` calls it has to make.
        alike: prompts of a call have one length, so that there is no padding.
    """

    request: RolloutRequest
    histories: RowHistories | None
    keys_B: torch.Tensor
    chunk_size: int
    calls: Callable[[int], int]
    alike: bool = False

    def run(
        self, sample: Callable[..., list[list[int]]], prompt_ids: Any, rows: list[int], filler: int
    ) -> list[list[int]]:
        """New token ids of each of `rows`; those of a process without prompts are one `filler` token.

        Args:
            sample: from prompts, keys, token offsets and row numbers of a chunk to its new token ids.
            prompt_ids: token ids so far of each of `rows`.
        """

        def keyed(part: list[int]) -> list[list[int]]:
            own = [rows[i] for i in part]
            index = torch.tensor(own)
            prompts = [prompt_ids[i] for i in part]
            offsets = torch.zeros_like(index) if self.histories is None else self.histories.offsets(index, prompts)
            return sample(prompts, self.keys_B[index], offsets, own)

        return self.chunk_by_chunk(keyed, prompt_ids, rows, filler)

    def chunk_by_chunk(
        self, sample: Callable[[list[int]], list[list[int]]], prompt_ids: Any, rows: list[int], filler: int
    ) -> list[list[int]]:
        """New token ids of each of `rows`, from a function of the positions in `rows` that make a chunk."""
        group = self.request.num_generations
        parts = rows_by_chunk(rows, max(1, self.chunk_size // group) * group)
        if self.alike:
            parts = [piece for part in parts for piece in by_length(part, prompt_ids)]
        own = 0 if self.request.empty else len(parts)
        result: list[list[int]] = [[filler] for _ in rows]
        for call in range(self.calls(own)):
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
