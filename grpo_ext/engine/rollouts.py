"""Rollouts: keyed sampling in canonical chunks, and the rollout batch every process holds afterwards.

Differs from TRL: the random number of a token depends on its key alone, chunks of whole groups are cut by global order
(so a chunk has the same shapes wherever it runs), and after scoring the completions are stored without padding.
Stands between the loaders and the window. Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..core.geometry import group_numbers
from ..core.keyed_random import choose, completion_keys, uniform
from ..core.micro_batches import StepSizes
from ..errors import PrecisionError
from .collectives import ragged_gather
from .decoding import compact_decode, growing_cache, unique_prompts
from .prompt_order import RolloutRequest

_PROMPT_FIELDS = ("prompt_ids", "prompt_mask")
_SEQUENCE_FIELDS = ("importance_sampling_ratio", "advantages")  # may be one value per sequence


class KeyedChoice(LogitsProcessor):
    """Last processor of a greedy `generate`: leaves only the token that the row's key samples.

    With `do_sample=False` the processors given to `generate` run after the model's own, in the order given, so the
    filters can be put before this one; arg-max then picks the token.
    """

    def __init__(self, keys_B: torch.Tensor, offsets_B: torch.Tensor, prompt_width: int) -> None:
        self.keys_B, self.offsets_B, self.prompt_width = keys_B, offsets_B, prompt_width
        self.broken = torch.zeros((), dtype=torch.bool, device=keys_B.device)  # read once, after the last token

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        position = input_ids.size(1) - self.prompt_width
        tokens = choose(scores, uniform(self.keys_B, self.offsets_B + position))
        self.broken |= (tokens == scores.size(1)).any().to(self.broken.device)
        tokens = tokens.clamp(max=scores.size(1) - 1)
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter_(1, tokens[:, None], 0.0)  # type: ignore[return-value]

    def keep(self, index: torch.Tensor) -> None:
        """Go on with these rows only."""
        self.keys_B, self.offsets_B = self.keys_B[index], self.offsets_B[index]


def padded(rows: Sequence[torch.Tensor], value: float, side: str, multiple: int | None = None) -> torch.Tensor:
    """Rows (T,) of any length as one (B, T), filled up on one side to the longest, or to the next multiple."""
    batch_BT = pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)
    more = -batch_BT.size(1) % (multiple or 1)
    return torch.nn.functional.pad(batch_BT, (more, 0) if side == "left" else (0, more), value=value)


_FILTERS = ("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


_NOT_PLAIN = (
    "watermarking_config",
    "guidance_scale",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
)


def sampling_filters(config: GenerationConfig) -> list[LogitsProcessor]:
    """transformers' filters of a sampling configuration, in the order `generate(do_sample=True)` applies them."""
    filters: list[LogitsProcessor] = []
    if config.temperature not in (None, 1.0):
        filters.append(TemperatureLogitsWarper(config.temperature))
    if config.top_h is not None:
        filters.append(TopHLogitsWarper(config.top_h))
    if config.top_k not in (None, 0):
        filters.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1.0:
        filters.append(TopPLogitsWarper(config.top_p))
    if config.min_p not in (None, 0.0):
        filters.append(MinPLogitsWarper(config.min_p))
    if config.typical_p is not None and config.typical_p < 1.0:
        filters.append(TypicalLogitsWarper(config.typical_p))
    if config.epsilon_cutoff is not None and 0.0 < config.epsilon_cutoff < 1.0:
        filters.append(EpsilonLogitsWarper(config.epsilon_cutoff))
    if config.eta_cutoff is not None and 0.0 < config.eta_cutoff < 1.0:
        filters.append(EtaLogitsWarper(config.eta_cutoff))
    return filters


def _split_sampling(config: GenerationConfig, model: Any) -> tuple[list[LogitsProcessor], GenerationConfig]:
    """The filters `generate` would sample with, and the configuration without them for a greedy `generate`.

    Like `generate`, what the configuration leaves open is taken from the model's own.
    """
    sampling, greedy = copy.deepcopy(config), copy.deepcopy(config)
    for name in _FILTERS:
        if getattr(sampling, name, None) is None:
            setattr(sampling, name, getattr(model.generation_config, name, None))
        setattr(greedy, name, None)
    if sampling.top_k is None:
        sampling.top_k = 50  # transformers' default, where neither says anything
    greedy.do_sample = False
    return sampling_filters(sampling), greedy


def can_sample_by_key(config: GenerationConfig) -> bool:
    """Whether this configuration is plain sampling, which is what keys can stand in for."""
    plain = bool(config.do_sample) and config.num_beams in (None, 1) and config.num_return_sequences in (None, 1)
    return plain and all(getattr(config, name, None) in (None, 1.0, False) for name in _NOT_PLAIN)


def request_keys(request: RolloutRequest, seed: int, stream: int) -> torch.Tensor:
    """Keys of the rows of this process, shape (B,), int64 on the CPU: one per completion, in row order."""
    numbers = torch.tensor(list(request.share)) + request.first_prompt
    prompts = numbers.repeat_interleave(request.num_generations)
    generations = torch.arange(request.num_generations).repeat(len(request.share))
    return completion_keys(seed, stream, request.epoch, request.layout.rollout, prompts, generations)


def sample_chunk(
    model: Any,
    prompts: Sequence[Sequence[int]],
    keys_B: torch.Tensor,
    offsets_B: torch.Tensor,
    config: GenerationConfig,
    eos_token_ids: Sequence[int],
    device: torch.device,
    pad_to_multiple_of: int | None = None,
    compact: bool = False,
) -> list[list[int]]:
    """Sample one completion for each row with the model's `generate`.

    Args:
        prompts: token ids of each row, without padding.
        keys_B, offsets_B: key of each row, and the token position its first new token has in the completion.
        config: a sampling configuration; temperature, top-k, top-p, min-p and the penalties mean what they mean there.
        eos_token_ids: any of these ends a completion (and is kept).
        compact: run each different prompt once, and let finished rows leave the batch (engine.decoding).

    Returns:
        The new token ids of each row, without padding.

    Raises:
        PrecisionError: the model's scores are no distribution.
    """
    firsts, numbers = unique_prompts(prompts) if compact else (range(len(prompts)), [])
    ids = [torch.tensor(prompts[row], dtype=torch.long) for row in firsts]
    input_ids = padded(ids, config.pad_token_id, "left", pad_to_multiple_of).to(device)
    attention_mask = padded([torch.ones_like(row) for row in ids], 0, "left", pad_to_multiple_of).to(device)
    filters, greedy = _split_sampling(config, model)
    width = input_ids.size(1)
    keyed = KeyedChoice(keys_B.to(device), offsets_B.to(device), width)
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    if compact:
        rows = torch.tensor(numbers, device=device)
        inputs["custom_generate"] = functools.partial(compact_decode, rows_B=rows, choice=keyed)
        inputs["past_key_values"] = growing_cache(model)
    processors = LogitsProcessorList([*filters, keyed])
    output = model.generate(**inputs, generation_config=greedy, logits_processor=processors)
    if bool(keyed.broken):
        raise PrecisionError("while sampling, the scores of the next token were not finite")
    return [_until_eos(row, eos_token_ids) for row in output[:, width:].tolist()]


def _until_eos(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: i + 1]
    return tokens


class RowIdentity:
    """Finds which row of the share a later turn continues, when tools make TRL generate again for some rows.

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
class ShareSampling:
    """Samples the rows of one process's share, chunk by chunk; later turns keep the chunks of the first.

    Attributes:
        identity: the rows' histories, None in the first turn.
        keys_B: key of every row of the share.
        chunk_size: completions per chunk, in whole groups.
        calls: from this process's number of chunks to the number of `generate` calls it has to make.
        alike: prompts of a call have one length, so that there is no padding.
    """

    request: RolloutRequest
    identity: RowIdentity | None
    keys_B: torch.Tensor
    chunk_size: int
    calls: Callable[[int], int]
    alike: bool = False

    def run(
        self, sample: Callable[..., list[list[int]]], prompt_ids: Any, rows: list[int], filler: int
    ) -> list[list[int]]:
        """New token ids of each of `rows`; a ghost's rows are one `filler` token, sampled only to keep step.

        Args:
            sample: from prompts, keys and token offsets of a chunk to its new token ids.
            prompt_ids: token ids so far of each of `rows`.
        """

        def keyed(part: list[int]) -> list[list[int]]:
            index = torch.tensor([rows[i] for i in part])
            prompts = [prompt_ids[i] for i in part]
            offsets = torch.zeros_like(index) if self.identity is None else self.identity.offsets(index, prompts)
            return sample(prompts, self.keys_B[index], offsets)

        return self.chunk_by_chunk(keyed, prompt_ids, rows, filler)

    def chunk_by_chunk(
        self, sample: Callable[[list[int]], list[list[int]]], prompt_ids: Any, rows: list[int], filler: int
    ) -> list[list[int]]:
        """New token ids of each of `rows`, from a function of the positions in `rows` that make a chunk."""
        group = self.request.num_generations
        parts = rows_by_chunk(rows, max(1, self.chunk_size // group) * group)
        if self.alike:
            parts = [piece for part in parts for piece in by_length(part, prompt_ids)]
        own = 0 if self.request.ghost else len(parts)
        result: list[list[int]] = [[filler] for _ in rows]
        for call in range(self.calls(own)):
            part = parts[call % len(parts)]
            tokens = sample(part)
            if call < own:
                for i, row in zip(part, tokens):
                    result[i] = row
        return result


@dataclass
class Rollout:
    """Scored completions (a rollout batch, or a step of it) in global order, the same on every process, unpadded.

    Attributes:
        fields: from TRL's names (`prompt_ids`, `completion_ids`, `completion_mask`, `advantages`, ...) to one 1-D
            tensor per completion. `completion_mask` is 0 on a truncated completion that `mask_truncated_completions`
            leaves out.
        groups: which group of the rollout batch each completion belongs to.
    """

    fields: dict[str, list[torch.Tensor]]
    groups: Sequence[int]

    @classmethod
    def of_groups(cls, fields: dict[str, list[torch.Tensor]], num_generations: int) -> Rollout:
        """A rollout batch, which is whole groups."""
        return cls(fields, group_numbers(len(fields["completion_ids"]), num_generations))

    def __len__(self) -> int:
        return len(self.fields["completion_ids"])

    def select(self, rows: Sequence[int]) -> Rollout:
        """The completions at `rows`."""
        fields = {name: [values[i] for i in rows] for name, values in self.fields.items()}
        return Rollout(fields, [self.groups[i] for i in rows])

    def sizes(self, multiple: int | None = None) -> StepSizes:
        """Tokens of the prompts and completions; a completion that is masked out has none.

        Where an environment has given the rows of a group different prompts, every row counts as a group of its own.
        """
        ids, rows, groups = self.fields["prompt_ids"], range(len(self)), self.groups
        shared = all(torch.equal(ids[row - 1], ids[row]) for row in rows[1:] if groups[row - 1] == groups[row])
        prompts, completions = (
            [int(mask.sum()) for mask in self.fields[name]] for name in ("prompt_mask", "completion_mask")
        )
        return StepSizes(groups if shared else rows, prompts, completions, multiple or 1)

    def loss_mask(self, row: int) -> torch.Tensor:
        """1 on the tokens of completion `row` that carry loss."""
        mask = self.fields["completion_mask"][row]
        return mask * self.fields["tool_mask"][row] if "tool_mask" in self.fields else mask

    def collate(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> dict[str, torch.Tensor]:
        """Pad to a batch, prompts on the left and completions on the right, to the longest row in it."""
        batch = {}
        for name, values in self.fields.items():
            # a ratio of 1 is no correction; the VESPO weight sums its logarithm over the padding too
            neutral = 1 if name in ("tool_mask", "importance_sampling_ratio") else 0
            fill = pad_token_id if name.endswith("_ids") else neutral
            if name in _SEQUENCE_FIELDS and all(v.numel() == 1 for v in values):
                batch[name] = torch.stack(values)
            else:
                side = "left" if name in _PROMPT_FIELDS else "right"
                batch[name] = padded(values, fill, side, pad_to_multiple_of)
        if batch["advantages"].size(1) == 1:  # one per completion; TRL lets a subclass give one per token
            batch["advantages"] = batch["advantages"].view(-1)
        return batch


def contributing_rows(rollout: Rollout) -> list[int]:
    """Rows with an advantage other than zero and a token that carries loss; the others add exactly nothing.

    A row whose advantage is not a number counts, so that what is wrong with it shows in the loss.
    """
    advantages = rollout.fields["advantages"]
    return [
        row for row, values in enumerate(advantages) if bool((values != 0).any()) and bool(rollout.loss_mask(row).any())
    ]


def gather_rollout(scored: dict[str, Any], rows: int, num_generations: int) -> Rollout:
    """Collect the shares of all processes into the rollout batch every process holds.

    Args:
        scored: what `_generate_and_score_completions` returned for this process's share, padded; tensors with one row
            per completion are kept, (B,), (B, 1) or (B, T).
        rows: rows of this process that count (0 on a ghost), whole groups.
    """
    prompt_lengths = scored["prompt_mask"].sum(1)
    # a completion that is masked out keeps one column, because a scored width of zero is no slice
    lengths = scored["completion_mask"].sum(1).clamp(min=1)
    fields: dict[str, list[torch.Tensor]] = {}
    for name in sorted(scored):
        value = scored[name]
        if not isinstance(value, torch.Tensor) or value.dim() not in (1, 2) or value.size(0) != len(lengths):
            continue
        if name in _PROMPT_FIELDS:
            parts = [row[row.size(0) - n :] for row, n in zip(value, prompt_lengths.tolist())]
        elif value.dim() == 1 or (value.size(1) == 1 and name in _SEQUENCE_FIELDS):
            parts = list(value.view(-1, 1))
        else:
            parts = [row[:n] for row, n in zip(value, lengths.tolist())]
        fields[name] = _gather_parts(parts, rows)
    return Rollout.of_groups(fields, num_generations)


def _gather_parts(parts: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    lengths = torch.tensor([p.numel() for p in parts], device=parts[0].device)
    flat = torch.cat(parts[:rows]) if rows else parts[0][:0]
    # kept on the CPU: a rollout is many short rows, and a micro-batch moves to the device as a whole
    return list(ragged_gather(flat).cpu().split(ragged_gather(lengths, rows).tolist()))


def rows_by_chunk(rows: list[int], chunk: int) -> list[list[int]]:
    """Positions in `rows` of the rows of each chunk of the share, so that later turns keep the chunks of the first."""
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


def chunks_of(rows: int, chunk: int) -> Iterator[slice]:
    """Slices that cut `rows` rows into chunks of `chunk`, in order; the last may be smaller."""
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))
