"""The decoding loop of rollouts: each different prompt of a chunk runs once, and finished rows leave the batch.

Differs from transformers' `GenerationMixin._sample`: that runs every copy of a prompt, keeps finished rows until the
longest is done, and copies the whole cache for every token. Runs inside `generate(custom_generate=...)`, so that
transformers interprets the configuration. Shapes: B rows, P prompts, T new tokens.
"""

import contextlib
import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria, MaxTimeCriteria

from ..compat import CACHE
from ..forward.architecture import base_model_of
from ..forward.choice import needs_whole_rows
from ..forward.prefix_cache import why_own_cache
from ..runtime.attributes import temporarily_set_each
from .keyed import NEW_TOKENS, setting_of

_LEAVE_SHARE = 8  # finished rows leave when they are one in this many
_LOOK_EVERY = {"cuda": 16}  # tokens between two checks for ended rows; on other devices 1
_HEADROOM = 64  # the fewest tokens that a growing layer allocates ahead
# kinds of criteria: limits cut a row off; end tokens and all other criteria (stop strings) end it
_KINDS: list[Any] = [(MaxLengthCriteria, MaxTimeCriteria), EosTokenCriteria]

EndedRows = list[tuple[list[int], bool]]  # the new tokens of each row, and whether it ended before a limit


def remaining_rows(done: Sequence[bool], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that are not done, in a new order, and its places that rows from the end of the batch take."""
    count = len(done) - sum(done)
    places = [row for row in range(count) if done[row]]
    from_the_end = iter([row for row in range(count, len(done)) if not done[row]])
    index = [next(from_the_end) if done[row] else row for row in range(count)]
    index_places = torch.tensor(index + places, device=device, dtype=torch.long)
    return index_places[:count], index_places[count:]


class GrowingLayer(DynamicLayer):
    """A cache layer that allocates ahead: a new token is written in place, and earlier ones are not copied."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._room: list[torch.Tensor] | None = None  # keys and values are views of its first tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (length := self.get_seq_length()) == 0:  # the rows of prompts are about to be repeated
            return super().update(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        total = length + key_states.size(2)
        if self._room is None or self._room[0].size(2) < total:
            added = total + max(_HEADROOM, total // 4) - length
            self._room = [torch.nn.functional.pad(states, (0, 0, 0, added)) for states in (self.keys, self.values)]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, length:total] = states
        self.keys, self.values = (room[:, :, :total] for room in self._room)
        return self.keys, self.values

    def keep(self, index: torch.Tensor, places: torch.Tensor) -> None:
        """Keep these rows; copies only those at `places` (`remaining_rows`)."""
        if self._room is None:
            self.reorder_cache(index)  # type: ignore[arg-type]
            return
        length, moved = self.get_seq_length(), index[places]
        for room in self._room:
            room[places, :, :length] = room[moved, :, :length]
        self._room = [room[: len(index)] for room in self._room]
        self.keys, self.values = (room[:, :, :length] for room in self._room)


class RolloutCache(DynamicCache):
    """The cache that `generate` would make for a model, with `GrowingLayer` for full attention.

    Under autocast it stores keys and values in autocast's type, because attention casts them to it.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        self.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
        half = torch.is_autocast_enabled(device.type)
        # not named `dtype`: Accelerate casts what has one
        self._states_dtype = torch.get_autocast_dtype(device.type) if half else None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        in_place = isinstance(layer, GrowingLayer) and layer.get_seq_length() > 0  # casts as it writes
        if self._states_dtype is not None and not in_place and key_states.dtype == torch.float32:
            key_states, value_states = key_states.to(self._states_dtype), value_states.to(self._states_dtype)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def decodes_compactly(model: Any, config: GenerationConfig) -> bool:
    policy = base_model_of(model)
    if needs_whole_rows(model) is not None or why_own_cache(policy) is not None:
        return False
    if hasattr(policy.base_model, "get_rope_index"):  # stores positions of every row of the batch
        return False
    dynamic = config.cache_implementation in (None, "dynamic")
    return dynamic and config.use_cache is not False and not config.prefill_chunk_size


def without_router_logits(config: Any) -> contextlib.AbstractContextManager[None]:
    """Turn off router logits: their load-balancing loss fails with the attention mask of a cache."""
    parts = (part for part in (config, config.get_text_config()) if getattr(part, "output_router_logits", False))
    return temporarily_set_each((part, {"output_router_logits": False}) for part in parts)


def unique(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Index of the first row of each different key, and for every row the number of its key."""
    firsts: dict[Hashable, int] = {}
    for row, key in enumerate(keys):
        firsts.setdefault(key, row)
    numbers = {key: number for number, key in enumerate(firsts)}
    return list(firsts.values()), [numbers[key] for key in keys]


def end_tokens(config: GenerationConfig) -> list[int]:
    """The end tokens of a configuration; negative ones mean none and are left out."""
    ends = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).view(-1).tolist()
    return [end for end in ends if end >= 0]


class Ends(StoppingCriteriaList):
    """transformers' stopping criteria, with a record of where and why each row ended."""

    def __init__(self, criteria: Sequence[Any], ids: torch.Tensor) -> None:
        super().__init__(criteria)
        limits, tokens = ([c for c in self if isinstance(c, kind)] for kind in _KINDS)
        self._limits = StoppingCriteriaList(limits)
        self._others: list[Any] = [c for c in self if not isinstance(c, tuple(_KINDS))]
        self._tokens = torch.cat([c.eos_token_id.to(ids.device).view(-1) for c in tokens] or [ids.new_empty(0)])
        # a criterion reads more than the last token, so the host checks after every token; else it may check several
        # tokens at once, and a row ends at its first end token
        self.looks_at_each = bool(self._others) or any(isinstance(c, MaxTimeCriteria) for c in limits)
        # new tokens of each row of the call, and whether a criterion ended it; False: a limit of length or time did
        self.lengths_B, self.ended_B = ids.new_zeros(len(ids)), ids.new_zeros(len(ids), dtype=torch.bool)
        # the numbers of the rows that are left, and which of them are done
        self.rows_B, self.done_B = torch.arange(len(ids), device=ids.device), self.ended_B.clone()

    def __call__(self, input_ids: Any, scores: Any, new: int = 1, **kwargs: Any) -> Any:
        """Which rows are done; `new` tokens were added since the last call."""
        ended_B = torch.isin(input_ids[:, -new:], self._tokens).any(1)
        if self.looks_at_each:
            for criterion in self._others:
                ended_B = ended_B | criterion(input_ids, scores, **kwargs)
            self.lengths_B[self.rows_B] += ~self.done_B
            self.ended_B[self.rows_B] |= ended_B & ~self.done_B
        self.done_B = self.done_B | ended_B | self._limits(input_ids, scores, **kwargs)
        return self.done_B

    def keep(self, index: torch.Tensor) -> None:
        self.rows_B, self.done_B = self.rows_B[index], self.done_B[index]

    def rows(self, ids_BT: torch.Tensor) -> EndedRows:
        if not self.looks_at_each:  # the first end token of each row
            is_end_BT = torch.isin(ids_BT, self._tokens)
            self.ended_B = is_end_BT.any(1)
            self.lengths_B = torch.where(self.ended_B, is_end_BT.int().argmax(1) + 1, ids_BT.size(1))
        columns = zip(ids_BT.tolist(), self.lengths_B.tolist(), self.ended_B.tolist(), strict=True)
        return [(ids[:length], ended) for ids, length, ended in columns]


def rows_by_ids(ids_BT: torch.Tensor, model: Any, config: GenerationConfig) -> EndedRows:
    """The rows of a loop that returns only ids: up to the first end token, or else up to the padding.

    A row shorter than the limit has ended; neither depends on the other rows.
    """
    rows, known, limit = [], set(end_tokens(config)), setting_of(model, config, "max_new_tokens") or NEW_TOKENS
    for ids in ids_BT.tolist():
        end = next((place for place, token in enumerate(ids, 1) if token in known), 0)
        length = end or next((n for n in range(len(ids), 1, -1) if ids[n - 1] != config.pad_token_id), 1)
        rows.append((ids[:length], end > 0 or length < limit))
    return rows


def steps_by_token(model: Any, config: GenerationConfig) -> bool:
    """Whether transformers' `generate` runs its loop `_sample`: no search and no speculation."""
    merged = copy.deepcopy(config)
    merged.update(**model.generation_config.to_dict(), defaults_only=True)  # as `generate` does
    return merged.get_generation_mode() in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)


def plain_decode(
    model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **others: Any
) -> EndedRows:
    ends = Ends(stopping_criteria, input_ids)
    output = model._sample(input_ids, logits_processor, ends, generation_config, **others)
    return ends.rows(output[:, input_ids.size(1) :])


class _Rows:
    """Rows of tokens that grow together; `ids` (B, tokens) includes prompts. A row that has ended may leave.

    On CUDA the host checks for ended rows once in several tokens, so that it does not wait for every token.
    """

    def __init__(self, ids: torch.Tensor, ends: Ends, pad: int) -> None:
        self.ids, self.ends, self._pad = ids, ends, pad
        self._prompts = ids.size(1)
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []  # numbers and ids of rows before some left
        self._checked = self._prompts  # tokens of a row at the last check
        self._look_every = 1 if ends.looks_at_each else _LOOK_EVERY.get(ids.device.type, 1)

    def append(self, tokens: torch.Tensor) -> None:
        self.ids = torch.cat([self.ids, tokens.masked_fill(self.ends.done_B, self._pad)[:, None]], dim=1)

    def ended(self, scores: torch.Tensor) -> list[bool]:
        """Which rows have ended; none between two checks."""
        length = self.ids.size(1)
        new = length - self._checked
        if new < self._look_every and length != self.ends.max_length:
            return [False] * len(self.ids)
        self._checked = length
        return self.ends(self.ids, scores, new).tolist()

    def keep(self, index: torch.Tensor) -> None:
        self._left.append((self.ends.rows_B, self.ids))
        self.ids = self.ids[index]
        self.ends.keep(index)

    def output(self) -> EndedRows:
        parts = [*self._left, (self.ends.rows_B, self.ids)]
        output = self.ids.new_full((len(parts[0][0]), self.ids.size(1)), self._pad)
        for numbers, ids in parts:
            output[numbers, : ids.size(1)] = ids
        return self.ends.rows(output[:, self._prompts :])


def compact_decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    rows_B: torch.Tensor,  # for every row the number of its prompt
    choice: Any,
    of_prompts: Sequence[str],  # arguments that only the forward of the prompts takes (images)
    **model_kwargs: Any,
) -> EndedRows:
    """Decode by key, for `generate(custom_generate=...)`; `input_ids` (P, width) have each prompt once."""
    logits, model_kwargs = _next(model, model._prefill(input_ids, generation_config, model_kwargs), model_kwargs)
    model_kwargs = {name: value for name, value in model_kwargs.items() if name not in of_prompts}
    _select(model_kwargs, rows_B, input_ids.size(0))
    input_ids = input_ids[rows_B]
    for processor in logits_processor:
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            processor.prompt_ignore_length = None  # of the prompts; with a penalty no row is padded
    model_kwargs[CACHE].reorder_cache(rows_B)
    ends = Ends(stopping_criteria, input_ids)
    logits, rows = logits[rows_B], _Rows(input_ids, ends, generation_config.pad_token_id)
    while True:
        scores = logits_processor(rows.ids, logits)
        rows.append(choice.tokens(rows.ids, scores))
        ended = rows.ended(scores)
        if all(ended):
            return rows.output()
        if sum(ended) * _LEAVE_SHARE >= len(ended):
            index, places = remaining_rows(ended, rows_B.device)
            _select(model_kwargs, index, len(ended))
            for layer in model_kwargs[CACHE].layers:
                layer.keep(index, places) if isinstance(layer, GrowingLayer) else layer.reorder_cache(index)
            rows.keep(index)
            choice.keep(index)
        inputs = model.prepare_inputs_for_generation(rows.ids, next_sequence_length=1, **model_kwargs)
        logits, model_kwargs = _next(model, model(**inputs, return_dict=True), model_kwargs)


def _next(model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    return outputs.logits[:, -1].float(), model._update_model_kwargs_for_generation(outputs, model_kwargs)


def _select(model_kwargs: dict[str, Any], index: torch.Tensor, rows: int) -> None:
    """Select rows of the arguments that have an entry for each of the batch's `rows`."""
    for name, value in model_kwargs.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.size(0) == rows:
            model_kwargs[name] = value[index]
