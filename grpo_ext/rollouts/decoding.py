"""The decoding loop of rollouts, where the model samples as transformers does: prompts go through the model once per
group, and finished rows leave the batch.

Differs from transformers' `GenerationMixin._sample`: that runs every copy of a prompt, keeps finished rows until the
longest is done, and copies the whole cache for every token. Runs inside `generate(custom_generate=...)`, so what a
configuration means is left to transformers. Shapes: B rows, P prompts, T new tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..forward.choice import needs_whole_rows
from ..forward.prefix_cache import why_own_cache
from ..forward.reference import base_model_of

_LEAVE_SHARE = 8  # finished rows leave when they are one in this many
_KEEPS_PROMPTS = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")
_HEADROOM = 64  # tokens of room a growing layer keeps at least


class GrowingLayer(DynamicLayer):
    """A cache layer with room to grow: a new token is written in place, instead of copying all that came before."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states (B, heads, tokens, dim); returns all states so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        total = held + key_states.size(2)
        if self._room is None or self._room[0].size(2) < total or self._room[0].size(0) != key_states.size(0):
            capacity = total + max(_HEADROOM, total // 4)
            room = []
            for states, old in ((key_states, self.keys), (value_states, self.values)):
                grown = states.new_empty(states.size(0), states.size(1), capacity, states.size(3))
                if held and old is not None:
                    grown[:, :, :held] = old
                room.append(grown)
            self._room = (room[0], room[1])
        for whole, states in zip(self._room, (key_states, value_states)):
            whole[:, :, held:total] = states
        self.keys, self.values = (whole[:, :, :total] for whole in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep (or repeat) rows; those that are kept where they are are not copied."""
        if self._room is None or self.keys is None or len(indices) > self.keys.size(0):
            self._room = None
            super().batch_select_indices(indices)
            return
        held, rows = self.get_seq_length(), len(indices)
        moved = (indices != torch.arange(rows, device=indices.device)).nonzero().squeeze(1)
        for whole in self._room:
            whole[moved, :, :held] = whole[indices[moved], :, :held]
        self._room = (self._room[0][:rows], self._room[1][:rows])
        self.keys, self.values = (whole[:, :, :held] for whole in self._room)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows."""
        self._room = None
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]


class _ChosenRows:
    """What transformers' layers with linear-attention or convolution states lack."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep (or repeat) rows."""
        self.reorder_cache(indices)  # type: ignore[attr-defined]


class StateLayer(_ChosenRows, LinearAttentionLayer):
    """The states of a linear-attention or convolution layer."""


class StateAndAttentionLayer(_ChosenRows, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """The same beside attention, in one layer."""


def _chosen(layer: Any) -> Any:
    """A cache layer whose rows can be chosen, in the place of one that is fresh; others as they are."""
    states = {LinearAttentionLayer: StateLayer, LinearAttentionAndFullAttentionLayer: StateAndAttentionLayer}
    if (kind := states.get(type(layer))) is not None:
        return kind(number_of_states=layer.number_of_states)
    return GrowingLayer() if type(layer) is DynamicLayer else layer


def growing_cache(model: Any) -> DynamicCache:
    """The cache `generate` would make for `model`, with room to grow in its full-attention layers."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [_chosen(layer) for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    return cache


def why_not_compact(model: Any, config: Any) -> str | None:
    """Why rows cannot leave the batch of this model, as a sentence; None if they can."""
    if (reason := needs_whole_rows(model)) is not None:
        return reason
    policy = base_model_of(model)
    if (reason := why_own_cache(policy)) is not None:
        return reason
    if hasattr(policy.base_model, "get_rope_index"):
        return f"{type(policy).__name__} keeps positions of its own for every row of the batch"
    if config.use_cache is False or config.cache_implementation not in (None, "dynamic"):
        return f"cache_implementation={config.cache_implementation!r}, use_cache={config.use_cache}"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size is set"
    for name in _KEEPS_PROMPTS:
        if any(getattr(c, name, None) not in (None, 0, 1.0) for c in (config, model.generation_config)):
            return f"{name} keeps the prompts of all rows"
    if not all(hasattr(layer, "batch_select_indices") for layer in growing_cache(model).layers):
        return f"{type(model).__name__} has cache layers whose rows cannot be chosen"
    return None


def own_generate(model: Any) -> str | None:
    """The name of a `generate` of the model's own (of its class, or replaced on it); None where it is transformers'.

    PEFT's wrappers hand over to the model inside, so that one decides.
    """
    function = getattr(model.generate, "__func__", model.generate)
    if getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.distributed."):
        function = function.__wrapped__  # FSDP2 gathers the weights around it
        function = getattr(function, "__func__", function)
    module = getattr(function, "__module__", None) or type(function).__module__
    name = f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    if module.split(".")[0] == "peft" and hasattr(model, "get_base_model"):
        return own_generate(model.get_base_model())
    # the name too, because a library may have replaced the method of the class
    plain = function is GenerationMixin.generate and name == "transformers.generation.utils.GenerationMixin.generate"
    return None if plain else name


@contextmanager
def without_router_logits(config: Any) -> Iterator[None]:
    """Inside, a model that is configured to return its router logits does not.

    Its forward would make the load-balancing loss of them, which fails under the attention mask of a cache.
    """
    asked = [part for part in (config, config.get_text_config()) if getattr(part, "output_router_logits", False)]
    for part in asked:
        part.output_router_logits = False
    try:
        yield
    finally:
        for part in asked:
            part.output_router_logits = True


def unique(keys: Iterable[Hashable]) -> tuple[list[int], list[int]]:
    """Index of the first row of each different key, and for every row the number of its key among them."""
    numbers: dict[Hashable, int] = {}
    firsts: list[int] = []
    numbering: list[int] = []
    for row, key in enumerate(keys):
        if key not in numbers:
            numbers[key] = len(firsts)
            firsts.append(row)
        numbering.append(numbers[key])
    return firsts, numbering


def compact_decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    rows_B: torch.Tensor,
    choice: Any,
    of_prompts: Sequence[str] = (),
    **model_kwargs: Any,
) -> torch.Tensor:
    """Decode greedily (the keyed choice is the last processor), for `generate(custom_generate=...)`.

    Args:
        input_ids: (P, width), each prompt once.
        rows_B: for every row the number of its prompt.
        choice: told which rows are left, by `keep(index)`.
        of_prompts: arguments of the model that only its run of the prompts is given (images).

    Returns:
        (B, width + T): prompts and new tokens, padded after the end of a row.
    """
    logits, model_kwargs = _next(model, model._prefill(input_ids, generation_config, model_kwargs), model_kwargs)
    model_kwargs = {name: value for name, value in model_kwargs.items() if name not in of_prompts}
    _select(model_kwargs, logits_processor, rows_B, input_ids.size(0))
    logits, ids = logits[rows_B], input_ids[rows_B]
    alive = torch.arange(len(rows_B), device=ids.device)  # row of each sequence that is still in the batch
    done = torch.zeros(len(rows_B), dtype=torch.bool, device=ids.device)
    columns: list[torch.Tensor] = []
    pad = generation_config.pad_token_id
    while True:
        scores = logits_processor(ids, logits)
        tokens = scores.argmax(-1).masked_fill(done, pad)
        columns.append(torch.full((len(rows_B),), pad, dtype=ids.dtype, device=ids.device).index_copy(0, alive, tokens))
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        done = done | stopping_criteria(ids, scores)
        finished = int(done.sum())
        if finished == len(alive):
            break
        if finished * _LEAVE_SHARE >= len(alive):
            left = _left(done)
            _select(model_kwargs, logits_processor, left, len(alive))
            ids, alive, done = ids[left], alive[left], done[left]
            choice.keep(left)
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
        logits, model_kwargs = _next(model, model(**inputs, return_dict=True), model_kwargs)
    return torch.cat([input_ids[rows_B], torch.stack(columns, dim=1)], dim=1)


def _next(model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of the next token (B, V), and the model's arguments for it, the cache among them."""
    return outputs.logits[:, -1].float(), model._update_model_kwargs_for_generation(outputs, model_kwargs)


def _left(done: torch.Tensor) -> torch.Tensor:
    """Rows to go on with: those behind move into the places of finished ones, and the others stay where they are."""
    rows = (~done).nonzero().squeeze(1)
    order = torch.arange(len(rows), device=done.device)
    order[done[: len(rows)]] = rows[rows >= len(rows)]
    return order


def _select(model_kwargs: dict[str, Any], processors: Any, index: torch.Tensor, rows: int) -> None:
    """Take rows of everything that has one for each sequence."""
    for processor in processors:
        padding = getattr(processor, "prompt_ignore_length", None)  # of the repetition penalty, one for each row
        if isinstance(padding, torch.Tensor):
            processor.prompt_ignore_length = padding[index.to(padding.device)]
    for name, value in model_kwargs.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.size(0) == rows:
            model_kwargs[name] = value[index]
    model_kwargs["past_key_values"].batch_select_indices(index)
