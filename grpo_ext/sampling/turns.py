"""The turns of TRL's scoring: which rows a turn goes on with, and their new tokens.

Differs from TRL: completions are sampled by key in chunks cut by global order, and vLLM gets a seed for each row.
Called from the trainer's `_generate_single_turn`, while `sampling.sampler` has TRL score this process's prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from transformers import GenerationConfig

from ..algorithms.keyed_random import EVAL_STREAM, TRAIN_STREAM
from ..batching.prompt_order import RolloutRequest
from ..batching.sizes import BatchGeometry
from ..compat import on_view
from ..config import GRPOConfig
from ..errors import ConfigError, PrecisionError
from ..forward.adapters import is_prompt_learning
from ..forward.images import RowImages
from ..precision.non_finite import FirstModule, bad_weight, explanation
from ..rewards.calls import RewardCalls
from ..rollouts.ragged import padded
from ..runtime.collectives import first_of_all_processes, max_over_processes, shards_parameters
from ..runtime.out_of_memory import Halving
from .chunks import RowTokens, chunks_of, rows_continued, run_chunks
from .decoding import own_generate, why_not_compact
from .generation import can_sample_by_key, request_keys, sample_chunk
from .recording import Recording
from .shown_images import ShownImages
from .vllm_seeds import completion_seeds, seeded


@dataclass(frozen=True)
class Generation:
    """How TRL was told to generate.

    Attributes:
        model: the policy, as PEFT wraps it; training: whether it trains, or evaluates.
        generating: the contexts of TRL's generation with transformers; gives the model.
        config: transformers' settings, without vLLM; vllm: TRL's `VLLMGeneration`, with it.
        eos_token_ids: any of these ends a completion.
        filler: the token of rows that no result contains.
    """

    model: Any
    training: bool
    generating: Callable[[], contextlib.AbstractContextManager[Any]]
    config: GenerationConfig | None
    vllm: Any
    eos_token_ids: Sequence[int]
    filler: int
    pad_to_multiple_of: int | None


@dataclass
class ScoringCall:
    """One call of TRL's scoring.

    Attributes:
        request: what this process samples.
        calls: how reward functions are called, and what they log.
        read: images of its rows, where they are read from the data set; shown: where tools or environments may show
            some. Neither for a model that takes none.
        pictures: those images as TRL has them, by row; None without any in the messages of this process.
        prompt_lengths: tokens of each row's prompt; None before the first turn.
        rewards_BF: of all processes; None before they are known.
        logged: what the reward functions of all processes logged, every value.
        recording: what its parts returned, where it runs twice (sampling.ahead).
    """

    request: RolloutRequest
    calls: RewardCalls
    read: RowImages | None = None
    shown: ShownImages | None = None
    pictures: list[Any] | None = None
    prompt_lengths: list[int] | None = None
    rewards_BF: torch.Tensor | None = None
    logged: dict[str, list[float]] = field(default_factory=dict)
    recording: Recording | None = None

    def of(self, part: str, make: Callable[[], Any]) -> Any:
        """What a part of the scoring returns; it is made once, also where the scoring runs twice."""
        return make() if self.recording is None else self.recording.of(part, make)

    @property
    def alone(self) -> bool:
        """Whether it runs beside training, where nothing is gathered."""
        return self.recording is not None and not self.recording.again

    @property
    def images(self) -> RowImages | None:
        """The images of its rows, as far as they have come; None for a model that takes none."""
        return self.read if self.shown is None else self.shown.rows

    def rows_of(self, prompt_ids: Sequence[Sequence[int]]) -> list[int]:
        """Which rows of this process a turn goes on with."""
        return list(range(len(prompt_ids))) if self.prompt_lengths is None else rows_continued(prompt_ids)

    def offsets_of(self, rows: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Token position of the next token in the completion of each row, tools' tokens counted, int64 (B,)."""
        lengths = self.prompt_lengths
        return torch.tensor([0 if lengths is None else len(ids) - lengths[row] for row, ids in zip(rows, prompt_ids)])

    def remember(
        self, rows: Sequence[int], prompt_ids: Sequence[Sequence[int]], completions: list[list[int]]
    ) -> list[list[int]]:
        """The completions of a turn, by which a later turn knows its rows again."""
        if self.prompt_lengths is None:
            self.prompt_lengths = [len(ids) for ids in prompt_ids]
        return [RowTokens(row, ids) for row, ids in zip(rows, completions)]


class TurnSampler:
    """Samples the turns of TRL's scoring.

    Attributes:
        sharded: a forward is a collective, as processes share the weights (FSDP, DeepSpeed).
        call: TRL's scoring, while it runs.
        memory: the number of completions that fit into one `generate`.
    """

    def __init__(self, accelerator: Accelerator, args: GRPOConfig, geometry: BatchGeometry) -> None:
        self.accelerator, self.args, self.geometry = accelerator, args, geometry
        self.sharded = shards_parameters(accelerator)
        self.call: ScoringCall | None = None
        remedy = "lower rollout_chunk_size (fewer completions at a time), or max_completion_length"
        self.memory = Halving("generation", remedy, not (self.sharded or args.bitwise_invariant))

    def samples_by_key(self, how: Generation) -> bool:
        """Whether the random number of every token follows from its key."""
        plain = how.vllm is None and how.config is not None and can_sample_by_key(how.config)
        return plain and own_generate(how.model) is None

    def generate(
        self, trl_turn: Any, how: Generation, prompt_ids: list[list[int]], fields: tuple[Any, ...], options: Any
    ) -> tuple[list[list[int]], Any]:
        """The new token ids of each row of a turn, and their log-probabilities where vLLM tells them.

        Args:
            trl_turn: TRL's `_generate_single_turn`, bound to the trainer.
            fields, options: what follows the prompts in its arguments.
        """
        call, logps = self.call, None
        assert call is not None
        rows = call.rows_of(prompt_ids)
        if call.shown is not None and fields[0] is not None:
            call.shown.so_far(fields[0], rows)
        if how.vllm is not None:
            seen = {"vllm_generation": self._with_seeds(call, how, prompt_ids, rows, fields[2])}
            plain = [list(ids) for ids in prompt_ids]  # they are sent to other processes
            completions, logps = on_view(trl_turn, seen, plain, *fields, **options)
        else:
            if self.samples_by_key(how):
                completions = self.by_key(call, how, prompt_ids, rows)
            else:
                completions = self._by_trl(trl_turn, call, how, prompt_ids, rows, fields, options)
            if call.request.empty:  # what was sampled kept other processes company
                completions = [[how.filler] for _ in rows]
        return call.remember(rows, prompt_ids, completions), logps

    def by_key(
        self, call: ScoringCall, how: Generation, prompt_ids: list[list[int]], rows: list[int]
    ) -> list[list[int]]:
        """New token ids of each row, sampled by key.

        Raises:
            PrecisionError: on every process, where the model's scores are no distribution on one.
        """
        found, failure = list[list[int]](), None
        keys_B, offsets_B = self._keys(call, how)[torch.tensor(rows)], call.offsets_of(rows, prompt_ids)
        # before parameters are gathered: a process that keeps others company learns here whether there is a turn
        chunks, calls = self._planned(call, how, prompt_ids, rows)
        try:
            with how.generating() as model:

                def work(part: Sequence[int]) -> list[list[int]]:
                    index = torch.tensor(part)
                    images = None if call.images is None else call.images.of([rows[i] for i in part])
                    prompts = [prompt_ids[i] for i in part]
                    return self._sample_chunk(model, how, prompts, keys_B[index], offsets_B[index], images)

                def fitting(chunk: list[int]) -> list[list[int]]:
                    return [row for piece in self.memory.run(chunk, work) for row in piece]

                found = run_chunks(chunks, calls, fitting)
        except PrecisionError as error:
            failure = str(error)
        if call.prompt_lengths is None:  # every process comes here once: none waits for one that failed
            failure = first_of_all_processes(failure)
        if failure is not None:
            raise PrecisionError(failure)
        return found

    def _by_trl(
        self,
        trl_turn: Any,
        call: ScoringCall,
        how: Generation,
        prompt_ids: list[list[int]],
        rows: list[int],
        fields: tuple[Any, ...],
        options: Any,
    ) -> list[list[int]]:
        """New token ids of each row, sampled by TRL's turn chunk by chunk."""
        images, _, *rest = fields
        # which makes TRL add types of tokens, which `inputs` has
        told = {name: value for name, value in options.items() if name != "has_tool_images"}

        def generate(chunk: list[int]) -> list[list[int]]:
            prompts, inputs = [prompt_ids[i] for i in chunk], {}
            if call.images is not None:
                tokens = [torch.tensor(ids) for ids in prompts]
                ids = padded(tokens, how.filler, "left", how.pad_to_multiple_of).to(self.accelerator.device)
                shown = call.images.of([rows[i] for i in chunk])
                inputs = shown.inputs(range(len(chunk)), ids, list(map(len, prompts)), ids.size(1))
            return trl_turn(prompts, images, inputs, *rest, **told)[0]

        return run_chunks(*self._planned(call, how, prompt_ids, rows), generate)

    def _sample_chunk(
        self, model: Any, how: Generation, prompts: Any, keys: Any, offsets: Any, images: RowImages | None
    ) -> list[list[int]]:
        config, device = how.config, self.accelerator.device
        assert config is not None
        compact = self.args.compact_rollouts and not self.sharded
        compact = compact and why_not_compact(model, config) is None
        multiple = None if is_prompt_learning(how.model) else how.pad_to_multiple_of
        chunk = (prompts, keys, offsets, config, how.eos_token_ids, device, multiple, compact, images)
        try:
            return sample_chunk(model, *chunk)
        except PrecisionError as error:
            if self.sharded:  # the other processes would not come along
                raise
            first = FirstModule()
            with first.watching(model), contextlib.suppress(PrecisionError):
                sample_chunk(model, *chunk)
            raise PrecisionError(f"{error}: {explanation(bad_weight(model), first.name, self.args.fp16)}.") from None

    def _with_seeds(
        self, call: ScoringCall, how: Generation, prompt_ids: Any, rows: list[int], num_generations: int
    ) -> Any:
        """TRL's `VLLMGeneration`, seen with one seed for each row of this process."""
        if call.prompt_lengths is None:
            self.refuse_unequal_slices(how.vllm, 0 if call.request.empty else len(rows))
        keys = self._keys(call, how)[torch.tensor(rows)]
        seeds = completion_seeds(keys, call.offsets_of(rows, prompt_ids), call.request.num_generations)
        return seeded(how.vllm, seeds, num_generations)

    def refuse_unequal_slices(self, generation: Any, rows: int) -> None:
        """Where TRL cuts what several processes sampled together, it does so as if all had as many rows.

        Raises:
            ConfigError: on every process.
        """
        device = self.accelerator.device
        most, fewest = max_over_processes(rows, device), -max_over_processes(-rows, device)
        together = generation.mode == "server" or generation.tensor_parallel_size > 1
        if together and most != fewest:
            raise ConfigError(
                "with a vLLM server or tensor parallel engines every process needs as many prompts, and here they have "
                f"{fewest} to {most} completions; use a number of prompts (also for evaluation) that "
                f"{self.accelerator.num_processes} processes share evenly."
            )

    def _keys(self, call: ScoringCall, how: Generation) -> torch.Tensor:
        return request_keys(call.request, self.args.seed, TRAIN_STREAM if how.training else EVAL_STREAM)

    def _planned(
        self, call: ScoringCall, how: Generation, prompt_ids: list[list[int]], rows: list[int]
    ) -> tuple[list[list[int]], int]:
        """The chunks of a turn, and how often to call `generate`: equally often everywhere where it is a collective."""
        group = call.request.num_generations
        size = max(1, self.geometry.rollout_chunk_size // group) * group
        # virtual tokens stand before the padding, so there must be none
        chunks = chunks_of(rows, prompt_ids, size, equal_lengths=is_prompt_learning(how.model))
        own = 0 if call.request.empty else len(chunks)
        return chunks, max_over_processes(own, self.accelerator.device) if self.sharded else own

    def keep_company(self, trl_turn: Any, how: Generation, num_generations: int) -> None:
        """Take part in the turns of other processes while the rows of this one are done, where generation is shared."""
        call, prompt = self.call, [[how.filler]]
        if call is None or not self.sharded or how.vllm is not None:
            return
        keys_B, first = self._keys(call, how)[:1], torch.zeros(1, dtype=torch.long)
        while calls := max_over_processes(0, self.accelerator.device):
            if not self.samples_by_key(how):
                for _ in range(calls):
                    trl_turn(prompt, None, {}, num_generations)
                continue
            with how.generating() as model:
                for _ in range(calls):
                    self._sample_chunk(model, how, prompt, keys_B, first, None)
