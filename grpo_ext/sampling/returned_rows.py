"""A rollout from the rows that a `rollout_func` returned: which of them continue another one, and which are trained.

A row whose context begins with all tokens of an earlier row continues it: both are one row of a forward. Any other
context begins a row of its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..forward.further_rows import FurtherRow
from .turn import Returned, Turn


class ReturnedRow(NamedTuple):
    """One row: the context in which its tokens were sampled, and what is known of each token."""

    prompt_ids: list[int]
    ids: list[int]
    logps: list[float | None] | None
    mask: list[int] | None  # 1 for each token of the model; None: the model wrote all
    kept_ids: list[list[int]] | None

    @property
    def mask_of_all(self) -> list[int]:
        return [1] * len(self.ids) if self.mask is None else self.mask

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    def turn(self) -> Turn:
        turn = Turn.of(self.ids, self.logps, self.kept_ids)
        return replace(turn, prompt_ids=self.prompt_ids, mask=self.mask)

    def with_more(self, new: list[int], row: "ReturnedRow") -> "ReturnedRow":
        """Its tokens, `new` ones that the model did not write, and those of another row."""

        def added(before: list[Any] | None, neutral: Any, after: list[Any] | None) -> list[Any] | None:
            return None if before is None or after is None else [*before, *[neutral] * len(new), *after]

        return self._replace(
            ids=[*self.ids, *new, *row.ids],
            mask=added(self.mask_of_all, 0, row.mask_of_all),
            logps=added(self.logps, 0.0, row.logps),
            kept_ids=added(self.kept_ids, [], row.kept_ids),
        )


def continues(row: ReturnedRow, earlier: ReturnedRow) -> bool:
    start = len(earlier.prompt_ids)
    return row.prompt_ids[:start] == earlier.prompt_ids and row.prompt_ids[start : earlier.length] == earlier.ids


def chains_of(rows: Sequence[ReturnedRow]) -> list[ReturnedRow]:
    """The rows, in the order of their first ones; a row that continues earlier ones is joined to the longest."""
    chains = list[ReturnedRow]()
    for row in rows:
        continued = [place for place, chain in enumerate(chains) if continues(row, chain)]
        if not continued:
            chains.append(row)
            continue
        place = max(continued, key=lambda place: chains[place].length)  # of equal ones the first
        chains[place] = chains[place].with_more(row.prompt_ids[chains[place].length :], row)
    return chains


def turn_of_rows(rows: Sequence[ReturnedRow]) -> Turn:
    """The completion of a rollout.

    A row without a token that is trained is counted and left out. Where no row has any, one token stands for the
    completion, which is not trained.
    """
    first, chains = rows[0], chains_of([row for row in rows if any(row.mask_of_all)])
    if not chains:
        token = (first.ids or first.prompt_ids)[-1:]
        logps: list[float | None] | None = None if first.logps is None else [0.0]
        kept_ids: list[list[int]] | None = None if first.kept_ids is None else [[]]
        chains = [ReturnedRow(first.prompt_ids, token, logps, [0], kept_ids)]
    places, whole = [0], chains[0]
    for chain in chains[1:]:
        places.append(len(whole.ids))
        whole = whole.with_more([], chain)
    further = [FurtherRow(place, chain.prompt_ids) for place, chain in zip(places, chains, strict=True)]
    if further[0].context == first.prompt_ids:
        further = further[1:]
    last = next((row for row in reversed(rows) if row.ids), first)
    returned = Returned(
        ids=[token for row in rows for token in row.ids],
        last_context=last.prompt_ids,
        last_ids=last.ids,
        last_call=next((row.ids for row in reversed(rows) if any(row.mask_of_all)), []),
        counts={
            "rows": len(chains),
            "longest": max(chain.length for chain in chains),  # tokens, context included
            "context_tokens": sum(len(row.context) for row in further),
            "untrained_tokens": sum(len(row.ids) for row in rows if not any(row.mask_of_all)),
        },
    )
    mask = None if whole.mask is None or all(whole.mask) else whole.mask
    return replace(whole._replace(prompt_ids=first.prompt_ids, mask=mask).turn(), further=further, returned=returned)
