"""The join: the one exchange of a rollout batch's data between processes.

Differs from TRL, which gathers rewards, lengths, logs and texts in some ten places of two methods, as if every process
had the same number of rows. Here each process sends its share once, of any size; advantages and what is logged are
computed from the shares of all.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..algorithms.digests import digest
from ..algorithms.losses import RatioRule
from ..batching.prompt_order import RolloutRequest
from ..errors import RolloutError
from ..forward.columns import (
    ADVANTAGES,
    COLUMNS,
    COMPLETION_IDS,
    CONTEXT_IDS,
    EXPERTS,
    FURTHER_ROWS,
    KEPT_COUNTS,
    KEPT_IDS,
    KEPT_MASS,
    OLD_LOGPS,
    PROMPT_IDS,
    RATIO,
    ROW_IMAGES,
    SAMPLING_LOGPS,
    TOOL_MASK,
    Rows,
)
from ..forward.further_rows import encoded
from ..rewards.worker import RewardCall
from ..runtime.collectives import gather_nested, gather_on_main, raise_on_all
from .batch import RolloutBatch, Values, column_state, concatenated, saved_column
from .images import ImageSource
from .local import LocalRollout
from .transcript import Transcript


@dataclass(frozen=True)
class Entry:
    """What is logged of a completion."""

    prompt_tokens: int
    tokens: int  # that the model wrote
    truncated: bool
    tool_calls: int
    tool_failures: int
    counts: Mapping[str, int]  # of a rollout that may have several rows, by what is counted
    kept_mass: float  # of all tokens together; NaN where unknown
    masked_out: str | None  # the digest of a completion that is masked out, whose tokens the batch does not have


# prompt, completion and images of a completion, for the table
Texts = tuple[Any, Any, Any]


class Share(NamedTuple):
    """What one process sends."""

    columns: dict[str, Any]  # by `column_state`; empty on a process without completions
    entries: list[Entry]
    rewards_BF: torch.Tensor | None
    reward_calls: list[RewardCall]
    first: int  # place of its first completion in the rollout batch, which its reward calls count from


@dataclass
class Round:
    """One round of a rollout batch, in global order, the same on every process."""

    request: RolloutRequest  # of one process; its row numbers are those of all
    batch: RolloutBatch
    rewards_BF: torch.Tensor
    advantages_B: torch.Tensor
    entries: list[Entry]
    reward_calls: list[RewardCall]  # in the order of the completions
    local_rows: range  # which of the rows are this process's
    texts: Sequence[Texts] = ()  # on the main process, which writes the table

    def __len__(self) -> int:
        return len(self.entries)


def exchange(local: LocalRollout, images: ImageSource, shows_images: bool) -> tuple[list[Share], list[Texts]]:
    """The shares of all processes, and on the main one the texts of all; a collective. Where one failed, all raise."""
    with raise_on_all("the exchange of a rollout batch"):
        if local.failure is not None:
            raise local.failure
        share = _share(local, images)
    texts = [(t.prompt, t.completion, (t.images or None) if shows_images else None) for t in local.real_transcripts]
    return gather_nested(share), gather_on_main(texts)


def join(
    local: LocalRollout,
    shares: Sequence[Share],
    texts: Sequence[Texts],
    rank: int,
    rewards_by_user: tuple[torch.Tensor, list[RewardCall]] | None,
) -> Round:
    """Join the shares of all processes, `local` among them, and on the main one their texts.

    `rewards_by_user` are what the user's `_calculate_rewards` returned for all completions, and the calls of reward
    functions in it; None without one.
    """
    settings = local.settings
    starts = list(itertools.accumulate((len(share.entries) for share in shares), initial=0))
    pairs = zip(shares, starts[:-1], strict=True)
    calls = [replace(c, first=c.first + start - share.first) for share, start in pairs for c in share.reward_calls]
    if rewards_by_user is None:
        rewards_BF = torch.cat([share.rewards_BF for share in shares if share.rewards_BF is not None])
    else:
        rewards_BF, calls = rewards_by_user[0], [*calls, *rewards_by_user[1]]
    entries, group = [entry for share in shares for entry in share.entries], settings.num_generations
    if len(entries) % group:
        raise RolloutError(f"there are {len(entries)} completions in groups of {group}; every group has to be whole.")
    _check_lengths(entries, settings.limits.max_completion_length)
    columns = [{n: saved_column(state) for n, state in share.columns.items()} for share in shares if share.columns]
    batch = RolloutBatch.of_columns(with_ratios(concatenated(columns), settings.ratios), group)
    advantages = settings.rule.advantages(rewards_BF, batch.loss_masks)
    return Round(
        request=local.request,
        batch=batch.having(ADVANTAGES, advantages),
        rewards_BF=rewards_BF,
        advantages_B=advantages,
        entries=entries,
        reward_calls=sorted(calls, key=lambda call: (call.first, call.number)),
        local_rows=range(starts[rank], starts[rank + 1]),
        texts=texts,
    )


def _share(local: LocalRollout, images: ImageSource) -> Share:
    transcripts = local.real_transcripts
    columns: dict[str, Values] = {}
    masked = local.settings.masked(transcripts)
    if transcripts:
        columns.update(token_columns(local, transcripts))
        if local.settings.replay.experts and EXPERTS not in columns:
            raise RolloutError("routing_replay=True: some completions came without experts.")
        if (packed := images.packed(local.settings.shown(transcripts))) is not None:
            columns[ROW_IMAGES] = packed
    entries = [
        Entry(
            prompt_tokens=len(transcript.prompt_ids),
            tokens=sum(transcript.mask),
            truncated=not transcript.ended,
            tool_calls=transcript.tool_calls,
            tool_failures=transcript.tool_failures,
            counts={} if transcript.returned is None else transcript.returned.counts,
            kept_mass=_kept_mass(transcript),
            masked_out=digest_of(transcript.ids, 0) if out else None,
        )
        for transcript, out in zip(transcripts, masked, strict=True)
    ]
    states = {name: column_state(column) for name, column in columns.items()}
    return Share(states, entries, local.rewards_BF, local.reward_calls, local.first)


def _check_lengths(entries: Sequence[Entry], limit: int) -> None:
    """Raise a RolloutError where a rollout of several rows, or one of its rows, is longer than sampling makes one."""
    longest = max(entry.prompt_tokens for entry in entries)
    for place, entry in enumerate(entries):
        tokens, row = (entry.counts.get(name, 0) for name in ("tokens", "longest"))
        if tokens > limit:
            raise RolloutError(
                f"rollout_func returned {tokens} tokens of the model and of tools in the rows of completion "
                f"{place}, and max_completion_length={limit} limits those of all rows together; end the rollout "
                "earlier, or raise it."
            )
        if row > longest + limit:
            raise RolloutError(
                f"rollout_func returned a row of {row} tokens, context included, in completion {place}; a "
                f"row has at most as many as the longest prompt ({longest}) and max_completion_length={limit} "
                "together. Shorten the context, or raise max_completion_length."
            )


def digest_of(ids: Sequence[int], mask: int) -> str:
    """The digest of a completion in the trail, with one mask for all of its tokens."""
    row = torch.tensor(ids)
    return digest(row, torch.full_like(row, mask))


def token_columns(local: LocalRollout, transcripts: Sequence[Transcript], with_masked: bool = False) -> dict[str, Rows]:
    """The columns of a rollout batch, except advantages and images.

    A completion that is masked out has no tokens, unless `with_masked`.
    """
    masked = local.settings.masked(transcripts)
    lengths = [0 if out and not with_masked else len(t.ids) for t, out in zip(transcripts, masked, strict=True)]

    def rows(name: str, values: Sequence[Any]) -> Rows:
        return Rows.of([row[:n] for row, n in zip(values, lengths, strict=True)], COLUMNS[name].dtype)

    columns = {
        PROMPT_IDS: Rows.of([t.prompt_ids for t in transcripts], COLUMNS[PROMPT_IDS].dtype),
        COMPLETION_IDS: rows(COMPLETION_IDS, [t.ids for t in transcripts]),
    }
    if local.has_mask:
        columns[TOOL_MASK] = rows(TOOL_MASK, [t.mask for t in transcripts])
    if any(transcript.further for transcript in transcripts):
        shown = [t.further if n else () for t, n in zip(transcripts, lengths, strict=True)]
        parts = [encoded(t.prompt_ids, t.ids, further) for t, further in zip(transcripts, shown, strict=True)]
        for name, values in zip((FURTHER_ROWS, CONTEXT_IDS), zip(*parts, strict=True), strict=True):
            columns[name] = Rows.of(values, COLUMNS[name].dtype)
    return columns | _recorded(local, transcripts, lengths)


def with_ratios(columns: Mapping[str, Any], rule: RatioRule | None) -> Mapping[str, Any]:
    """The columns, with the ratios of the policy to the engine where a rule asks for them."""
    if rule is None or OLD_LOGPS not in columns or SAMPLING_LOGPS not in columns:
        return columns
    old = columns[OLD_LOGPS]
    masks = columns.get(TOOL_MASK, replace(old, values=torch.ones_like(old.values)))
    ratios = [rule.ratios(*row) for row in zip(old, columns[SAMPLING_LOGPS], masks, strict=True)]
    return {**columns, RATIO: torch.stack(ratios) if rule.of_sequences else Rows.of(ratios)}


def _recorded(local: LocalRollout, transcripts: Sequence[Transcript], lengths: Sequence[int]) -> dict[str, Rows]:
    """What is known of so many tokens of all transcripts."""
    replay, columns = local.settings.replay, dict[str, Rows]()
    parts = [transcript.first(n) for transcript, n in zip(transcripts, lengths, strict=True)]
    # of the mass a process sends a sum, in `Entry`
    wanted = {KEPT_COUNTS: replay.masks, KEPT_IDS: replay.masks, EXPERTS: replay.experts, KEPT_MASS: False}
    for name in dict.fromkeys(name for part in parts for name in part):
        if wanted.get(name, True) and all(name in part for part in parts):
            columns[name] = Rows.of([part[name] for part in parts])
    if replay.masks and KEPT_COUNTS not in columns and not local.request.stands_in:
        raise RolloutError("sampling_mask='replay': some completions came without the tokens that were kept.")
    return columns


def _kept_mass(transcript: Transcript) -> float:
    """The mass that the filters kept, summed over the tokens that the model wrote; NaN where unknown."""
    if (mass_T := transcript.columns.get(KEPT_MASS)) is None:
        return math.nan
    return float((mass_T * torch.tensor(transcript.mask)).sum())
