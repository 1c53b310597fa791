"""Completions with their prompts, without padding: the input of every forward.

TRL pads its batches throughout. Here only TRL's methods (`of_padded`, `in_columns`) and the padded forward do. Rows
stay on the CPU, where a forward is planned; its tensors move to the device together (forward.forms). Shapes: B rows,
N tokens, S completion tokens, T columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from ..algorithms.keyed_random import token_keys
from ..batching.sizes import ceil_div
from .columns import ATTENDED, COLUMNS, DROPOUT, Rows
from .images import Prepared, RowImages


class RowOf(NamedTuple):
    """A row of a completion that may have several (forward.further_rows)."""

    completion: int  # its number
    context: int = 0  # tokens after the prompt that get no log-probability
    repeated: int = 0  # tokens, from the first, that an earlier row of the completion begins with too
    shares: bool = True  # whether it begins with the completion's prompt; else its prompt is its whole context
    run: int = 0  # rows with one number have the same prompt


@dataclass(frozen=True)
class TokenRows:
    ids_N: torch.Tensor  # of all rows, concatenated
    prompts_B: Sequence[int]  # tokens of each
    # tokens of each after the prompt; 0 for a completion that is masked out
    completions_B: Sequence[int]
    same_text: Sequence[bool]  # for each row but the first, whether the text of its prompt is that of the row before
    images: RowImages | None = None  # of the prompts; None for a model that takes none
    # what else is known of the tokens, by name of `forward.columns`; no `attended` where attention sees all. As in TRL,
    # a masked token keeps its position and gets no log-probability, and the next token is predicted from it
    columns: Mapping[str, Rows] = field(default_factory=dict)
    group_lengths_B: Sequence[tuple[int, ...]] | None = None  # of all completions of its group; None: of these rows
    several: Sequence[RowOf] | None = None  # one for each row, by completion; None: each row is a completion

    @classmethod
    def of_padded(
        cls, input_ids: torch.Tensor, mask: torch.Tensor, completion_width: int, images: RowImages | None = None
    ) -> TokenRows:
        """Rows of a batch (B, L) in TRL's layout: prompts padded on the left, completions on the right."""
        input_ids, attended = input_ids.cpu(), mask.cpu().bool()
        width = input_ids.size(1) - completion_width
        # from the first token of the prompt that attention sees to the last of the completion
        before = attended[:, :width].cumsum(1) > 0
        after = attended[:, width:].flip(1).cumsum(1).flip(1) > 0
        prompts = input_ids[:, :width].masked_fill(~before, -1)
        same = (prompts[1:] == prompts[:-1]).all(dim=1).tolist()
        real = torch.cat([before, after], dim=1)
        rows = cls(input_ids[real], before.sum(1).tolist(), after.sum(1).tolist(), same, images)
        attended_N = attended[real]
        return rows if attended_N.all() else rows.having(ATTENDED, attended_N)

    @classmethod
    def joined(cls, parts: Sequence[TokenRows]) -> TokenRows:
        """The rows of several processes, part after part; without images. A part may lack a column."""
        same = [same for part in parts for same in (False, *part.same_text)][1:]
        columns: dict[str, Rows] = {}
        for name, known in {name: column for part in parts for name, column in part.columns.items()}.items():
            columns[name] = Rows.joined([part.columns.get(name) or part.neutral(name, known) for part in parts])
        ids_N = torch.cat([part.ids_N for part in parts])
        prompts_B = [n for part in parts for n in part.prompts_B]
        completions_B = [n for part in parts for n in part.completions_B]
        lengths_B = [n for part in parts for n in part.group_lengths_B or [(n,) for n in part.completions_B]]
        several, completions = list[RowOf](), 0
        for part in parts:
            runs = zip(part.rows_of, part.runs_B, strict=True)
            first = max((row.run for row in several), default=-1) + 1
            several += [r._replace(completion=completions + r.completion, run=first + run) for r, run in runs]
            completions = several[-1].completion + 1 if several else 0
        of_rows = None if all(part.several is None for part in parts) else several
        return cls(ids_N, prompts_B, completions_B, same, None, columns, lengths_B, of_rows)

    def neutral(self, name: str, like: Rows) -> Rows:
        """A column that these rows lack."""
        lengths = self._lengths(name)
        return Rows(like.values.new_full((sum(lengths), *like.values.shape[1:]), COLUMNS[name].neutral), lengths)

    def having(self, name: str, values: torch.Tensor | None) -> TokenRows:
        """The same rows with a column; None: without it."""
        others = {other: column for other, column in self.columns.items() if other != name}
        return replace(self, columns=others if values is None else others | {name: Rows(values, self._lengths(name))})

    def of(self, name: str) -> torch.Tensor | None:
        """The values of a column, one row after the other; None without it."""
        return self.columns[name].values if name in self.columns else None

    def _lengths(self, name: str) -> list[int]:
        lengths = {"both": list(map(sum, zip(self.prompts_B, self.completions_B, strict=True)))}
        return (lengths | {"completion": self.scored_B, "kept": [0] * len(self)})[COLUMNS[name].extent]

    def __len__(self) -> int:
        return len(self.prompts_B)

    @property
    def same_prompt(self) -> Sequence[bool]:
        """For each row but the first, whether its prompt is that of the row before, with its images."""
        if self.images is None:
            return self.same_text
        return [text and pixels for text, pixels in zip(self.same_text, self.images.same, strict=True)]

    @property
    def lengths_B(self) -> list[int]:
        """Tokens of each row."""
        return self._lengths(ATTENDED)

    @property
    def scored_B(self) -> list[int]:
        """Tokens of each row that belong to its completion, and get log-probabilities."""
        return [n - row.context for n, row in zip(self.completions_B, self.rows_of, strict=True)]

    @property
    def rows_of(self) -> Sequence[RowOf]:
        return [RowOf(number) for number in range(len(self))] if self.several is None else self.several

    def by_completion(self, numbers_B: Sequence[int]) -> list[int]:
        """Sums of numbers of rows, one for each completion."""
        sums: dict[int, int] = {}
        for row, number in zip(self.rows_of, numbers_B, strict=True):
            sums[row.completion] = sums.get(row.completion, 0) + number
        return list(sums.values())

    @property
    def counted_N(self) -> torch.Tensor:
        """1 on each token of all rows, int64, and 0 where an earlier row of the completion has it too."""
        if self.several is None:
            return torch.ones_like(self.ids_N)
        lengths = zip(self.lengths_B, self.rows_of, strict=True)
        return torch.cat([(torch.arange(length) >= row.repeated).long() for length, row in lengths])

    @property
    def starts_B(self) -> list[int]:
        """Indices of the first token of each row; the last is the number of all tokens."""
        return [0, *accumulate(self.lengths_B)]

    @property
    def runs_B(self) -> list[int]:
        """For each row the number of its run of rows with one prompt, from 0; neighbours, but for `several`."""
        if self.several is None:
            return [*accumulate((not same for same in self.same_prompt), initial=0)]
        numbers = dict[int, int]()
        return [numbers.setdefault(row.run, len(numbers)) for row in self.several]

    def with_dropout(self, start: int, groups: Sequence[int], completions: Sequence[int]) -> TokenRows:
        """The same rows, with keys of dropout (`token_keys`), by the group and the number of each completion."""
        groups_B = [groups[row.completion] if row.shares else None for row in self.rows_of]
        owners_B = [completions[row.completion] for row in self.rows_of]
        return self.having(DROPOUT, token_keys(start, groups_B, owners_B, self.prompts_B, self.completions_B))

    def same_tokens(self, other: TokenRows) -> bool:
        """Whether these rows have the tokens of others, and attention sees the same of them."""
        lengths = [[*rows.prompts_B, *rows.completions_B] for rows in (self, other)]
        if lengths[0] != lengths[1] or not torch.equal(self.ids_N, other.ids_N):
            return False
        seen = [rows.of(ATTENDED) for rows in (self, other)]
        one, two = (torch.ones_like(self.ids_N) if attended is None else attended for attended in seen)
        return torch.equal(one.bool(), two.bool())

    def part(self, rows: Sequence[int]) -> TokenRows:
        """Consecutive rows."""
        first, last, starts = rows[0], rows[-1] + 1, self.starts_B
        columns = {name: column.select(range(first, last)) for name, column in self.columns.items()}
        if ATTENDED in columns and columns[ATTENDED].values.all():
            del columns[ATTENDED]
        return TokenRows(
            self.ids_N[starts[first] : starts[last]],
            self.prompts_B[first:last],
            self.completions_B[first:last],
            self.same_text[first : last - 1],
            None if self.images is None else self.images.of(rows),
            columns,
            None if self.group_lengths_B is None else self.group_lengths_B[first:last],
            None if self.several is None else self.several[first:last],
        )

    def image_inputs(self, rows: Sequence[int], ids_BL: torch.Tensor, pixels: bool = True) -> Prepared:
        return {} if self.images is None else self.images.inputs(rows, ids_BL, pixels)

    def targets(self) -> torch.Tensor:
        """The completion tokens that get log-probabilities, (S,)."""
        tokens = self._of_completions(self.ids_N)
        return tokens if (attended_N := self.of(ATTENDED)) is None else tokens[self._of_completions(attended_N)]

    def with_unseen(self, values_S: torch.Tensor) -> torch.Tensor:
        """Values of the `targets`, and 0 for the other tokens of the completions."""
        if (attended_N := self.of(ATTENDED)) is None:
            return values_S
        seen_S = self._of_completions(attended_N).to(values_S.device)
        return seen_S.to(values_S.dtype).masked_scatter(seen_S, values_S)

    def in_columns(self, values_S: torch.Tensor, width: int) -> torch.Tensor:
        """Values of the `targets` in TRL's layout, (B, width), zero elsewhere.

        They stay connected to the graph even where there are none, so every process can run its backward pass.
        """
        values_BT = pad_sequence(self.with_unseen(values_S).split(self.scored_B), batch_first=True)
        return torch.nn.functional.pad(values_BT, (0, width - values_BT.size(1)))

    def _of_completions(self, values_N: torch.Tensor) -> torch.Tensor:
        rows = zip(self.starts_B[1:], self.scored_B, strict=True)
        return torch.cat([values_N[stop - scored : stop] for stop, scored in rows])

    def padded(self, multiple: int, left: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Ids and mask (B, L) in TRL's layout, and the completion columns T, at least 1; widths in whole multiples.

        `left`: further columns of padding before all prompts.
        """
        prompt = ceil_div(max(*self.prompts_B, 1), multiple) * multiple + left
        width = ceil_div(max(*self.completions_B, 1), multiple) * multiple
        column_L = torch.arange(-prompt, width)
        begins = torch.tensor([-n for n in self.prompts_B])[:, None]
        ends = torch.tensor(list(self.completions_B))[:, None]
        mask = (column_L >= begins) & (column_L < ends)
        ids = self.ids_N.new_zeros(mask.shape).masked_scatter(mask, self.ids_N)
        return ids, mask.long(), width


def unpadded(rows: Iterable[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """The first values of each row, by the lengths of the rows, one row after the other."""
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
