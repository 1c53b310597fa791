"""The join: the one exchange of a rollout batch's data between processes.

Differs from TRL, which gathers rewards, lengths, logs and texts in some ten places of two methods, as if every process
had the same number of rows. Here each process sends its share once, of any size; advantages and what is logged are
computed from the shares of all.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..algorithms.digests import digest
from ..batching.prompt_order import RolloutRequest
from ..errors import RolloutError
from ..rewards.worker import RewardCall
from ..runtime.collectives import gather_lists, raise_on_all
from .batch import EXPERTS, KEPT_COUNTS, KEPT_IDS, SAMPLER_LOGPS, Column, Ragged, RolloutBatch, concatenated
from .images import ImageSource
from .local import LocalRollout, RolloutSettings
from .transcript import Transcript


@dataclass(frozen=True)
class Entry:
    """What is logged of a completion."""

    prompt: Any
    completion: Any
    images: Any
    prompt_tokens: int
    tokens: int  # that the model wrote
    truncated: bool
    tool_calls: int
    tool_failures: int
    kept_mass: float  # of all tokens together; NaN where unknown
    masked_out: str | None  # the digest of a completion that is masked out, of which the batch has one token


@dataclass
class Share:
    """What one process sends."""

    columns: dict[str, Column]  # empty on a process without completions
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

    def __len__(self) -> int:
        return len(self.entries)


def exchange(local: LocalRollout, images: ImageSource, shows_images: bool) -> list[Share]:
    """The shares of all processes; a collective. Where one failed, all raise."""
    with raise_on_all("the exchange of a rollout batch"):
        if local.failure is not None:
            raise local.failure
        share = _share(local, images, shows_images)
    return gather_lists([share])


def join(
    request: RolloutRequest,
    shares: Sequence[Share],
    settings: RolloutSettings,
    rank: int,
    rewards_by_user: tuple[torch.Tensor, list[RewardCall]] | None = None,
) -> Round:
    """Join the shares of all processes.

    `rewards_by_user` are what the user's `_calculate_rewards` returned for all completions, and the calls of reward
    functions in it; None without one.
    """
    starts = list(itertools.accumulate((len(share.entries) for share in shares), initial=0))
    pairs = zip(shares, starts[:-1], strict=True)
    calls = [replace(c, first=c.first + start - share.first) for share, start in pairs for c in share.reward_calls]
    if rewards_by_user is None:
        rewards_BF = torch.cat([share.rewards_BF for share in shares if share.rewards_BF is not None])
    else:
        rewards_BF, calls = rewards_by_user[0], [*calls, *rewards_by_user[1]]
    entries, group = [entry for share in shares for entry in share.entries], settings.sampling.num_generations
    if len(entries) % group:
        raise RolloutError(f"there are {len(entries)} completions in groups of {group}; every group has to be whole.")
    batch = RolloutBatch.of_columns(concatenated([share.columns for share in shares if share.columns]), group)
    rule, weights_F = settings.rewards.rule, settings.rewards.weights_F
    advantages = batch.columns["advantages"] = rule.advantages(rewards_BF, weights_F, group, batch.loss_masks)
    return Round(
        request=request,
        batch=batch,
        rewards_BF=rewards_BF,
        advantages_B=advantages,
        entries=entries,
        reward_calls=sorted(calls, key=lambda call: (call.first, call.number)),
        local_rows=range(starts[rank], starts[rank + 1]),
    )


def _share(local: LocalRollout, images: ImageSource, shows_images: bool) -> Share:
    transcripts = local.real_transcripts
    columns: dict[str, Column] = {}
    masked = local.settings.sampling.masked(transcripts)
    if transcripts:
        columns = trl_columns(local, transcripts) | images.columns_of(transcripts, masked)
    entries = [
        Entry(
            prompt=transcript.prompt,
            completion=transcript.completion,
            images=(transcript.images or None) if shows_images else None,
            prompt_tokens=len(transcript.prompt_ids),
            tokens=sum(transcript.mask),
            truncated=not transcript.ended,
            tool_calls=transcript.tool_calls,
            tool_failures=transcript.tool_failures,
            kept_mass=_kept_mass(transcript),
            masked_out=digest_of(transcript.ids, 0) if out else None,
        )
        for transcript, out in zip(transcripts, masked, strict=True)
    ]
    return Share(columns, entries, local.rewards_BF, local.reward_calls, local.first)


def digest_of(ids: Sequence[int], mask: int) -> str:
    """The digest of a completion in the trail, with one mask for all of its tokens."""
    row = torch.tensor(ids)
    return digest(row, torch.full_like(row, mask))


def trl_columns(local: LocalRollout, transcripts: Sequence[Transcript], with_masked: bool = False) -> dict[str, Column]:
    """The columns of a rollout batch, except advantages and images, under TRL's names.

    With `with_masked` a masked-out completion keeps all its tokens. Otherwise one stays: TRL takes the last T columns
    by `[:, -T:]`, which are all of them for T = 0.
    """
    sampling = local.settings.sampling
    masked = sampling.masked(transcripts)
    lengths = [1 if out and not with_masked else len(t.ids) for t, out in zip(transcripts, masked, strict=True)]
    loss_masks = masks = [torch.full((n,), int(not out)) for n, out in zip(lengths, masked, strict=True)]
    columns: dict[str, Column] = {
        "prompt_ids": Ragged.of([t.prompt_ids for t in transcripts], torch.long),
        "prompt_mask": Ragged.of([torch.ones(len(t.prompt_ids), dtype=torch.long) for t in transcripts]),
        "completion_ids": Ragged.of([t.ids[:n] for t, n in zip(transcripts, lengths, strict=True)], torch.long),
        "completion_mask": Ragged.of(masks),
    }
    if local.has_mask:
        loss_masks = [torch.tensor(t.mask[:n]) * mask for t, n, mask in zip(transcripts, lengths, masks, strict=True)]
        columns["tool_mask"] = Ragged.of(loss_masks)
    if all(t.record is not None for t in transcripts):
        records = [t.record.first(n) for t, n in zip(transcripts, lengths, strict=True) if t.record is not None]
        columns[SAMPLER_LOGPS] = Ragged.of([record.logps_T for record in records])
        if sampling.replay.masks:
            columns[KEPT_COUNTS] = Ragged.of([record.counts_T for record in records])
            columns[KEPT_IDS] = Ragged.of([record.ids_K for record in records])
    elif sampling.replay.masks and not local.request.stands_in:
        raise RolloutError("sampling_mask='replay': some completions came without the tokens that were kept.")
    if sampling.replay.experts:
        experts = [t.experts[: len(t.prompt_ids) + n] for t, n in zip(transcripts, lengths) if t.experts is not None]
        if len(experts) != len(transcripts):
            raise RolloutError("routing_replay=True: some completions came without experts.")
        columns[EXPERTS] = Ragged.of(experts)
    for name, logps in local.logps.items():  # none of the tokens of a completion that is masked out
        pairs = zip(logps, lengths, strict=True)
        columns[name] = Ragged.of([row if len(row) else row.new_zeros(n) for row, n in pairs])
    if transcripts and transcripts[0].logps is not None:  # NaN where the engine did not report it
        rows = ([math.nan if value is None else value for value in t.logps or ()] for t in transcripts)
        columns["sampling_per_token_logps"] = Ragged.of(
            [torch.tensor(row[:n]) for row, n in zip(rows, lengths, strict=True)]
        )
    names = ("old_per_token_logps", "sampling_per_token_logps")
    if (rule := local.settings.logprobs.ratios) is not None and all(name in columns for name in names):
        ratios = [rule.ratios(*row) for row in zip(*(columns[name] for name in names), loss_masks, strict=True)]
        columns["importance_sampling_ratio"] = torch.stack(ratios) if rule.of_sequences else Ragged.of(ratios)
    return columns


def _kept_mass(transcript: Transcript) -> float:
    """The mass that the filters kept, summed over the tokens that the model wrote; NaN where unknown."""
    if transcript.record is None:
        return math.nan
    return float((transcript.record.mass_T * torch.tensor(transcript.mask)).sum())
