"""The decoding loop of rollouts, where the model samples as transformers does: each different prompt of a
chunk goes through the model once, and finished rows leave the batch.

Differs from transformers' `GenerationMixin._sample`: that runs every copy of a prompt, keeps finished rows until the
longest is done, and copies the whole cache for every token. Runs inside `generate(custom_generate=...)`, so what a
configuration means is left to transformers. Shapes: B rows, P prompts, T new tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer

from ..forward.choice import needs_whole_rows
from ..forward.prefix_cache import why_own_cache
from ..forward.reference import base_model_of

_LEAVE_SHARE = 8  # finished rows leave when they are one in this many
_HEADROOM = 64  # tokens of room a growing layer keeps at least


class GrowingLayer(DynamicLayer):
    """A cache layer with room to grow: a new token is written in place, instead of copying all that came before."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._room: list[torch.Tensor] | None = None  # of which keys and values are the first tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states (B, heads, tokens, dim); returns all states so far."""
        if (length := self.get_seq_length()) == 0:  # prompts, whose rows are about to be repeated
            return super().update(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        total = length + key_states.size(2)
        if self._room is None or self._room[0].size(2) < total:
            added = total + max(_HEADROOM, total // 4) - length
            self._room = [torch.nn.functional.pad(states, (0, 0, 0, added)) for states in (self.keys, self.values)]
        for room, states in zip(self._room, (key_states, value_states)):
            room[:, :, length:total] = states
        self.keys, self.values = (room[:, :, :total] for room in self._room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep these rows, at most as many as there are; a row that stays where it is is not copied."""
        if self._room is None:
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
            return
        length, rows = self.get_seq_length(), len(beam_idx)
        moved = (beam_idx != torch.arange(rows, device=beam_idx.device)).nonzero().squeeze(1)
        for room in self._room:
            room[moved, :, :length] = room[beam_idx[moved], :, :length]
        self._room = [room[:rows] for room in self._room]
        self.keys, self.values = (room[:, :, :length] for room in self._room)


def growing_cache(model: Any) -> DynamicCache:
    """The cache `generate` would make for `model`, with room to grow in its full-attention layers."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def decodes_compactly(model: Any, config: GenerationConfig) -> bool:
    """Whether prompts can run once and rows can leave the batch; else transformers' own loop runs."""
    policy = base_model_of(model)
    if needs_whole_rows(model) is not None or why_own_cache(policy) is not None:
        return False
    if hasattr(policy.base_model, "get_rope_index"):  # keeps positions for every row of the batch
        return False
    if config.use_cache is False or config.cache_implementation not in (None, "dynamic") or config.prefill_chunk_size:
        return False
    # these processors keep the prompts of all rows
    names = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")
    configs = (config, model.generation_config)
    return all(getattr(c, name, None) in (None, 0, 1.0) for c in configs for name in names)


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
    configs = [part for part in (config, config.get_text_config()) if getattr(part, "output_router_logits", False)]
    for part in configs:
        part.output_router_logits = False
    try:
        yield
    finally:
        for part in configs:
            part.output_router_logits = True


def unique(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Index of the first row of each different key, and for every row the number of its key among them."""
    firsts: dict[Hashable, int] = {}
    for row, key in enumerate(keys):
        firsts.setdefault(key, row)
    numbers = {key: number for number, key in enumerate(firsts)}
    return list(firsts.values()), [numbers[key] for key in keys]


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
        choice: the keyed choice, which has to know the rows that remain.
        of_prompts: arguments that only the forward of the prompts takes (images).

    Returns:
        (B, width + T): prompts and new tokens, padded after the end of a row.
    """
    logits, model_kwargs = _next(model, model._prefill(input_ids, generation_config, model_kwargs), model_kwargs)
    model_kwargs = {name: value for name, value in model_kwargs.items() if name not in of_prompts}
    _select(model_kwargs, logits_processor, rows_B, input_ids.size(0))
    logits, ids = logits[rows_B], input_ids[rows_B]
    alive = torch.arange(len(rows_B), device=ids.device)  # row of each sequence in the batch
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
            order = _unfinished(done)
            _select(model_kwargs, logits_processor, order, len(alive))
            ids, alive, done = ids[order], alive[order], done[order]
            choice.keep(order)
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
        logits, model_kwargs = _next(model, model(**inputs, return_dict=True), model_kwargs)
    return torch.cat([input_ids[rows_B], torch.stack(columns, dim=1)], dim=1)


def _next(model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of the next token (B, V), and the model's arguments for it, the cache among them."""
    return outputs.logits[:, -1].float(), model._update_model_kwargs_for_generation(outputs, model_kwargs)


def _unfinished(done: torch.Tensor) -> torch.Tensor:
    """The rows without an end: the last of them take the places of finished rows, the others keep theirs."""
    rows = (~done).nonzero().squeeze(1)
    order = torch.arange(len(rows), device=done.device)
    order[done[: len(rows)]] = rows[rows >= len(rows)]
    return order


def _select(model_kwargs: dict[str, Any], processors: Any, index: torch.Tensor, rows: int) -> None:
    """Select rows of processors, arguments and cache.

    Args:
        rows: of the batch; an argument of this size has an entry for each.
    """
    for processor in processors:
        padding = getattr(processor, "prompt_ignore_length", None)  # of the repetition penalty, one for each row
        if isinstance(padding, torch.Tensor):
            processor.prompt_ignore_length = padding[index.to(padding.device)]
    for name, value in model_kwargs.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.size(0) == rows:
            model_kwargs[name] = value[index]
    model_kwargs["past_key_values"].reorder_cache(index)
