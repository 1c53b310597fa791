"""What a sampler is given and returns: the tokens before a turn, and the turn.

Differs from TRL, which passes lists of ids, and one list more for each quantity. Shapes: N tokens of prompt and
completion.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..errors import RolloutError
from ..forward.columns import (
    EXPERTS,
    KEPT_COUNTS,
    KEPT_IDS,
    KEPT_MASS,
    SAMPLER_LOGPS,
    SAMPLING_LOGPS,
    TokenColumns,
    first_tokens,
)
from ..forward.further_rows import FurtherRow


@dataclass
class Context:
    """A completion as far as it is: what its next turn is sampled from."""

    key: int  # of the random numbers of its tokens (algorithms.keyed_random), int64
    place: int = 0  # among the completions of this process
    number: int | None = None  # contexts with one number have the same prompt and images; None: images of its own
    prompt: Any = ""  # text, or messages: after the environment's reset, with images in their content
    prompt_ids: list[int] = field(default_factory=list)  # without padding
    ids: list[int] = field(default_factory=list)  # of the completion so far
    images: list[Any] = field(default_factory=list)  # of the prompt, then those shown by tools
    prompt_images: int = 0  # how many of `images` are the prompt's
    turns: int = 0  # how often tools have answered

    @property
    def all_ids(self) -> list[int]:
        return self.prompt_ids + self.ids


class Returned(NamedTuple):
    """What a `rollout_func` returned of a rollout of several rows."""

    ids: list[int]  # the rows' own tokens, of the model and of tools, also those of rows that are not trained
    last_context: list[int]  # of the last row that has tokens
    last_ids: list[int]  # its tokens
    last_call: list[int]  # tokens of the last row with one that the model wrote: they tell whether the rollout ended
    counts: Mapping[str, int]  # by what is counted: see `turn_of_rows`

    def check(self, limit: int) -> None:
        if len(self.ids) > limit:
            raise RolloutError(
                f"rollout_func returned {len(self.ids)} tokens of the model and of tools in the rows of a rollout, and "
                f"max_completion_length={limit} limits those of all rows together; end the rollout earlier, or raise "
                "max_completion_length."
            )


@dataclass(frozen=True)
class Turn:
    """New tokens of one completion, and what sampled them recorded of each."""

    ids: list[int]
    # by name of `forward.columns`, on the CPU; the experts are those of the tokens before these too
    columns: TokenColumns = field(default_factory=dict, compare=False)
    ended: bool | None = None  # False: a limit of length or time cut it off; None: only its last token can tell
    # of a sampler that makes whole completions: the prompt's tokens, 1 for each token of the model, and values that are
    # added to the row of the data
    prompt_ids: list[int] | None = None
    mask: list[int] | None = None  # None: the model wrote all
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    further: Sequence[FurtherRow] = ()  # rows of the completion after the first
    returned: Returned | None = None  # of a rollout of several rows

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        logps: Sequence[float | None] | None,  # None: unknown
        kept_ids: Sequence[Sequence[int]] | None = None,  # those that each token was sampled from
        ended: bool | None = None,
    ) -> "Turn":
        """A turn from the lists of a user's function or of vLLM."""
        columns = dict[str, torch.Tensor]()
        values = [None] * len(ids) if logps is None else logps
        known = torch.tensor([math.nan if value is None else float(value) for value in values])
        if logps is not None:
            columns[SAMPLING_LOGPS] = known
        if kept_ids is not None:
            columns |= {SAMPLER_LOGPS: known, KEPT_MASS: torch.full_like(known, math.nan)}
            columns[KEPT_COUNTS] = torch.tensor([len(among) for among in kept_ids], dtype=torch.int32)
            columns[KEPT_IDS] = torch.tensor([token for among in kept_ids for token in among], dtype=torch.int32)
        return cls(list(ids), columns, ended)

    @property
    def last_ids(self) -> list[int]:
        return self.ids if self.returned is None else self.returned.last_call

    @property
    def logps(self) -> list[float | None] | None:
        """The engine's log-probabilities, as TRL's methods return them."""
        values = self.columns.get(SAMPLING_LOGPS)
        return None if values is None else [None if math.isnan(value) else value for value in values.tolist()]

    def first(self, tokens: int) -> "Turn":
        if tokens >= len(self.ids):
            return self
        context = len(self.columns[EXPERTS]) - len(self.ids) if EXPERTS in self.columns else 0
        columns = first_tokens(self.columns, context, tokens)
        return replace(self, ids=self.ids[:tokens], columns=columns, ended=self.ended and False)


def images_shown(rows: Sequence[Context]) -> list[list[Any] | None] | None:
    """The images of each row, None for one without; None if no row has any."""
    images = [row.images or None for row in rows]
    return images if any(images) else None
