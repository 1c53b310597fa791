"""Engines sample the next tokens of completions. Those here call the model's `generate`, by key and in chunks.

Differs from TRL, which generates all rows of a process at once with one generator: here the random number of a token
depends only on the row's key and the token's position. Chunks are cut in global order, so a chunk in a call of
its own has the same shapes for every number of processes. Where padding, or other rows, change what a model computes,
its calls have none. Called by the worker, once for every turn.
"""

import contextlib
import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

from ..batching.sizes import ChunkSizes, batch_key
from ..compat import CACHE
from ..config import NO_REPLAY, Replay
from ..errors import PrecisionError, RolloutError
from ..forward.architecture import base_model_of, cached_numbers
from ..forward.carried import Carried, carrying
from ..forward.columns import SAMPLER_LOGPS, Rows
from ..forward.form_check import rounding_unit, text_ids
from ..forward.images import TOKEN_TYPES, RowImages
from ..forward.routing import Router
from ..precision.non_finite import explanation, first_module
from ..runtime.attributes import temporarily_set
from ..runtime.collectives import max_over_processes
from ..runtime.out_of_memory import Halving, available_bytes
from ..upstream.continuous_batching import keeping_weights
from . import decoding
from .decoding import RolloutCache, decodes_compactly, unique, without_router_logits
from .keyed import KeyedChoice, greedy_config, own_generate, reads_padding, sampling_filters, why_not_by_key
from .turn import Context, Turn

_ROOM = 1.25  # the most that a growing cache allocates, relative to what it holds
_MIXED = 64  # times the rounding of one operation: log-probabilities of a row in two batches differ by at most this
_SCORE_BYTES = 16  # for each token of the vocabulary: its score in float32, and copies of filters and choice


class Engine(ABC):
    """Samples turns; an engine of another package says of itself what these attributes do."""

    routers: Sequence[Router] = ()  # whose experts it returns, in the order of their columns

    @abstractmethod
    def generate(self, rows: Sequence[Context], config: GenerationConfig | None, sizes: ChunkSizes) -> list[Turn]:
        """New tokens of each row, in order; `config` is transformers' for this rollout batch, None with vLLM."""

    def has_same_bits(self) -> bool:
        """Whether its bits do not depend on what else it samples, as it declares itself."""
        return True


@dataclass(frozen=True)
class EngineSettings:
    device: torch.device
    tokenizer: Any  # for stop strings
    filler: int  # the token of rows that reach no result
    pad: int  # the padding token of TRL's dictionary
    multiple: int | None = None  # TRL's `pad_to_multiple_of`
    compact: bool = True  # in a call, each different prompt runs once, and finished rows leave the batch
    sharded: bool = False  # a forward is a collective, because processes share the weights (FSDP, DeepSpeed)
    replay: Replay = NO_REPLAY
    fp16: bool = False  # named in the explanation of scores that are not finite


def cut_calls(rows: Sequence[Context], sizes: ChunkSizes) -> list[list[int]]:
    """The rows of each `generate` call, by their index; later turns are cut like the first."""
    # the first place of a process begins a chunk (`batching.sizes.process_prompts`), so places on a process cut the
    # chunks of the whole rollout batch
    calls: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        chunk = 0 if sizes.call is None else row.place // sizes.call
        key = batch_key(sizes.batching, len(row.all_ids), index)
        calls.setdefault((chunk, key), []).append(index)
    return list(calls.values())


@dataclass
class TransformersEngine(Engine):
    model: Callable[[], Any]  # returns the policy, with PEFT's wrapper
    generating: Callable[[], contextlib.AbstractContextManager[Any]]  # prepares the model for generation and yields it
    settings: EngineSettings
    images_of: Callable[[Sequence[Context]], RowImages | None]  # None for a model that takes no images
    memory: Halving  # the number of completions that fit into one `generate`
    _mixes: bool | None = None  # see `_mixes_rows`

    def generate(self, rows: Sequence[Context], config: GenerationConfig | None, sizes: ChunkSizes) -> list[Turn]:
        assert config is not None
        sampled: dict[int, Turn] = {}
        policy = self.model()
        # `config` has the stop strings (`Sampler.config`)
        without_strings = {} if own_generate(policy) else {"stop_strings": None}
        with (
            without_router_logits(policy.config),
            temporarily_set(policy.generation_config, **without_strings),
            self.generating() as model,
        ):
            settings, model_pads = self.settings, sizes.batching == "any"
            # without padding a model may have a state outside of the cache, which compact decoding does not reorder
            compact = model_pads and not settings.sharded and decodes_compactly(model, config)
            compact = compact and why_not_by_key(policy, config) is None
            if model_pads and reads_padding(base_model_of(policy), config):
                sizes = replace(sizes, batching="equal_lengths")
            multiple = settings.multiple if sizes.batching == "any" else None
            settings = replace(settings, compact=compact, multiple=multiple)
            if not model_pads and sizes.batching == "equal_lengths" and self._mixes_rows(model, config, settings):
                sizes = replace(sizes, batching="single")
            calls = cut_calls(rows, sizes)
            stand_in = rows[:1] or [Context(0, prompt_ids=[settings.filler])]
            for number in range(max_over_processes(len(calls)) if settings.sharded else len(calls)):
                indices = calls[number] if number < len(calls) else []
                chunk = [rows[index] for index in indices] or stand_in
                expected = self._expected_rows(model, chunk, config, settings)
                sample = functools.partial(self._sample, model, chunk, config, settings)
                pieces = self.memory.run(range(len(chunk)), sample, expected)
                if indices:
                    sampled |= zip(indices, (row for piece in pieces for row in piece), strict=True)
        return [sampled[index] for index in range(len(rows))]

    def _mixes_rows(self, model: Any, config: GenerationConfig, settings: EngineSettings) -> bool:
        """Whether prompts of one length change one another, compared once: a step of RWKV's decoding mixes rows."""
        if self._mixes is None:
            policy, config = base_model_of(model), copy.deepcopy(config)
            ids = text_ids(policy.config, settings.tokenizer)
            rows = [Context(key, prompt_ids=ids[key // 2 :][:4]) for key in range(4)]
            config.max_new_tokens = 8
            sample = functools.partial(self._sample, model, rows, config, settings)
            most = _MIXED * rounding_unit(policy, settings.device)
            pairs = zip(sample(range(4)), (sample([place])[0] for place in range(4)), strict=True)
            self._mixes = not all(_agree(one, other, most) for one, other in pairs)
        return self._mixes

    def _expected_rows(
        self, model: Any, chunk: Sequence[Context], config: GenerationConfig, settings: EngineSettings
    ) -> int | None:
        """How many completions of a chunk fit into the free memory at full length; None where that is unknown."""
        free = available_bytes(settings.device)
        if free is None or config.max_new_tokens is None:
            return None
        policy, kind = base_model_of(model), settings.device.type
        # `RolloutCache` casts what it holds
        half = torch.is_autocast_enabled(kind) and settings.compact
        dtype = torch.get_autocast_dtype(kind) if half else policy.dtype
        tokens = max(len(row.all_ids) for row in chunk) + config.max_new_tokens
        cache = cached_numbers(policy.config, tokens) * dtype.itemsize * _ROOM
        return int(free // (cache + policy.config.get_text_config().vocab_size * _SCORE_BYTES))

    def _sample(
        self,
        model: Any,
        chunk: Sequence[Context],
        config: GenerationConfig,
        settings: EngineSettings,
        part: Sequence[int],
    ) -> list[Turn]:
        rows, keyed = [chunk[i] for i in part], why_not_by_key(self.model(), config) is None
        arguments = rows, config, settings, self.images_of(rows), keyed
        try:
            return sample_chunk(model, *arguments)
        except PrecisionError as error:
            if settings.sharded:  # a second forward would be a collective without the other processes
                raise
            with first_module(model) as first, contextlib.suppress(PrecisionError):
                sample_chunk(model, *arguments)
            raise PrecisionError(f"{error}: {explanation(model, first, settings.fp16)}.") from None


def _agree(one: Turn, other: Turn, most: float) -> bool:
    if one.ids != other.ids:
        return False
    if SAMPLER_LOGPS not in one.columns or SAMPLER_LOGPS not in other.columns:
        return True
    return bool((one.columns[SAMPLER_LOGPS] - other.columns[SAMPLER_LOGPS]).abs().max() <= most)


def sample_chunk(
    model: Any,
    rows: Sequence[Context],
    config: GenerationConfig,
    settings: EngineSettings,
    images: RowImages | None = None,
    keyed: bool = True,
) -> list[Turn]:
    """New tokens of each row, by one call of the model's `generate`: by key, or by transformers, as in TRL."""
    prompts = [row.all_ids for row in rows]
    images_B = [None] * len(rows) if images is None else images.numbers_B
    different = zip(map(tuple, prompts), images_B, strict=True) if settings.compact else range(len(rows))
    firsts, numbers = unique(list(different))
    contexts, inputs = [len(prompts[i]) for i in firsts], _model_inputs([prompts[i] for i in firsts], settings)
    width = inputs["input_ids"].size(1)
    if images is not None:
        inputs |= images.inputs(firsts, inputs["input_ids"])
    choice = recorder = None
    if keyed:
        filters, recorder = sampling_filters(model, config, settings.replay)
        choice = KeyedChoice(rows, width, recorder, settings.device)
        inputs["logits_processor"] = filters if settings.compact else LogitsProcessorList([*filters, choice])
        config = greedy_config(model, config)
    if own_generate(model) is None:
        config = _with_loop(inputs, model, config, settings, choice, numbers if settings.compact else None)
    with carrying(model, Carried(None if recorder is None else recorder.routing)):
        output = model.generate(**inputs, generation_config=config)
    if choice is not None and choice.was_broken():
        raise PrecisionError("while sampling, the scores of the next token were not finite")
    rows_B = output if isinstance(output, list) else decoding.rows_by_ids(output[:, width:], model, config)
    if len(rows_B) != len(rows):
        raise RolloutError(f"generate returned {len(rows_B)} rows for {len(rows)} prompts; each prompt needs one.")
    if recorder is None:
        return [Turn(ids, ended=ended) for ids, ended in rows_B]
    lengths = [len(ids) for ids, _ in rows_B]
    columns_B = recorder.columns(contexts, numbers, lengths)
    return [Turn(ids, columns, ended) for (ids, ended), columns in zip(rows_B, columns_B, strict=True)]


def _model_inputs(prompts: Sequence[Sequence[int]], settings: EngineSettings) -> dict[str, Any]:
    ids = Rows.of(prompts, torch.long)
    masks = replace(ids, values=torch.ones_like(ids.values))
    input_ids, mask = ids.padded(settings.pad, "left", settings.multiple), masks.padded(0, "left", settings.multiple)
    return {"input_ids": input_ids.to(settings.device), "attention_mask": mask.to(settings.device)}


def _with_loop(
    inputs: Any, model: Any, config: GenerationConfig, settings: EngineSettings, choice: Any, numbers: Any
) -> GenerationConfig:
    """Let `generate` run a loop that reports how rows end; with `numbers`, one that runs each prompt once."""
    of_prompts = tuple(inputs.keys() - {"input_ids", "attention_mask", "logits_processor", *TOKEN_TYPES})
    if config.stop_strings:  # transformers does not take a tokenizer together with `custom_generate`
        criterion = StopStringCriteria(settings.tokenizer, config.stop_strings)
        inputs["stopping_criteria"] = StoppingCriteriaList([criterion])
        config = copy.deepcopy(config)
        config.stop_strings = None
    if numbers is not None:
        rows_B = torch.tensor(numbers, device=settings.device)
        decode = functools.partial(decoding.compact_decode, rows_B=rows_B, choice=choice, of_prompts=of_prompts)
        inputs |= {"custom_generate": decode, CACHE: RolloutCache(model, settings.device)}
    elif decoding.steps_by_token(model, config):  # transformers does not pass on `synced_gpus`
        synced = settings.sharded and torch.distributed.is_initialized()
        inputs["custom_generate"] = functools.partial(decoding.plain_decode, synced_gpus=synced)
    return config


@dataclass(frozen=True)
class ContinuousBatching(Engine):
    turn: Callable[..., Any]
    model: Callable[[], Any]

    def generate(self, rows: Sequence[Context], config: GenerationConfig | None, sizes: ChunkSizes) -> list[Turn]:
        if not rows:
            return []
        with keeping_weights(self.model()):
            ids, _ = self.turn([row.all_ids for row in rows], None, {}, sizes.group)
        return [Turn(list(row)) for row in ids]
