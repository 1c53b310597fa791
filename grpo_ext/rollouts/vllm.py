"""vLLM engines: one seed per completion, from the same key as this package's own sampler.

Differs from TRL, which seeds an engine by the index of its process, so that completions depend on the number of
processes. `VllmEngine` calls TRL's `VLLMGeneration.generate`, in both of its modes; `VllmServer` asks a server for one
process alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import GenerationConfig

from ..algorithms.keyed_random import mix
from ..runtime.attributes import assigned
from ..runtime.collectives import any_process, gather_in_group, gather_lists
from .engine import Sampled
from .rollout_func import TOGETHER, refuse_unequal_shares
from .transcript import Transcript

_BITS = (1 << 62) - 1  # what a server's 64-bit seed holds, with room for the index of a completion
_CONCURRENT = 256  # requests to a server at a time; it batches what has arrived


class VllmEngine:
    """Samples with TRL's `VLLMGeneration`, whose weights are the current ones.

    Args:
        generation: TRL's.
        profile: TRL's profiling context of a name.
    """

    def __init__(self, generation: Any, profile: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.generation, self.profile = generation, profile

    @property
    def together(self) -> bool:
        """Whether processes sample in one call, whose completions TRL divides among them in equal shares."""
        return self.generation.mode == "server" or self.generation.tensor_parallel_size > 1

    def generate(
        self, transcripts: Sequence[Transcript], config: GenerationConfig | None, num_generations: int
    ) -> list[Sampled]:
        """See `Engine`.

        Raises:
            RolloutError: on every process, where processes sample together and have different numbers of rows.
        """
        if self.together and not any(transcript.turns for transcript in transcripts):
            refuse_unequal_shares("vLLM", len(transcripts), TOGETHER)
        if not transcripts:
            return []
        seeds = seeds_of(transcripts, num_generations)
        prompts = [transcript.prompt_ids + transcript.ids for transcript in transcripts]
        images = [transcript.images or None for transcript in transcripts]
        copies = copies_of(transcripts, num_generations)
        if self.together and any_process(copies == 1, self.generation.accelerator.device):
            copies = 1
        with seeded(self.generation, seeds, copies):
            _, ids, logps, _ = self.generation.generate(
                prompts=prompts,
                images=images if any(images) else None,
                num_generations=copies,
                profiler=self.profile("vLLM.generate"),
            )
        return with_first_logps(ids, logps)


class VllmServer:
    """Asks a vLLM server for the transcripts of this process alone, without the others.

    Args:
        generation: TRL's `VLLMGeneration`, for its settings.
        client: of this process.
    """

    def __init__(self, generation: Any, client: Any) -> None:
        self.generation, self.client = generation, client

    def generate(
        self, transcripts: Sequence[Transcript], config: GenerationConfig | None, num_generations: int
    ) -> list[Sampled]:
        """See `Engine`."""
        if not transcripts:
            return []
        settings, copies = self.generation, copies_of(transcripts, num_generations)
        firsts = transcripts[::copies]
        prompts = [transcript.prompt_ids + transcript.ids for transcript in firsts]
        features = None
        if any(transcript.images for transcript in firsts):
            parts = self.client.image_features([transcript.images or None for transcript in firsts])
            features = [settings._place_features(part, ids) for part, ids in zip(parts, prompts)]
        names = ("repetition_penalty", "temperature", "top_p", "top_k", "logprobs", "structured_outputs_regex")
        options = {name: getattr(settings, name) for name in (*names, "generation_kwargs")}
        options |= {"min_p": 0.0 if settings.min_p is None else settings.min_p, "n": copies}
        options["max_tokens"] = settings.max_completion_length
        seeds = seeds_of(transcripts, num_generations)[::copies]
        answer = _one_request_per_prompt(self.client, seeds, prompts, features, **options)
        return with_first_logps(answer["completion_ids"], answer["logprobs"])


def copies_of(transcripts: Sequence[Transcript], num_generations: int) -> int:
    """`num_generations` where all transcripts of every group continue the same tokens, else 1."""
    groups = [transcripts[i : i + num_generations] for i in range(0, len(transcripts), num_generations)]
    shared = all(
        len(group) == num_generations
        and not any(row.ids for row in group)
        and all(row.prompt_ids == group[0].prompt_ids and row.images == group[0].images for row in group)
        for group in groups
    )
    return num_generations if shared else 1


def with_first_logps(ids: Sequence[Sequence[int]], logps: Any) -> list[Sampled]:
    """Completions with the log-probability of each sampled token, which vLLM lists first."""
    values = [None] * len(ids) if logps is None else [[token[0] for token in row] for row in logps]
    return [(list(row), value) for row, value in zip(ids, values)]


def seeds_of(transcripts: Sequence[Transcript], num_generations: int) -> list[int]:
    """The seeds of a turn, from the keys and the position of the first token that is sampled.

    In the first turn the completions of a group have consecutive seeds, because vLLM gives the i-th of `n` completions
    the seed of the request plus i; so both modes sample the same. In a later turn each row has a seed of its own.
    """
    keys_B = torch.tensor([transcript.key for transcript in transcripts])
    offsets_B = torch.tensor([len(transcript.ids) for transcript in transcripts])
    if bool((offsets_B > 0).any()):
        return (mix(keys_B, offsets_B) & _BITS).tolist()
    firsts = keys_B[::num_generations].repeat_interleave(num_generations)[: len(keys_B)]
    return ((firsts & _BITS) + torch.arange(len(keys_B)) % num_generations).tolist()


class _WithGenerate:
    """An engine or a client of vLLM with another `generate`."""

    def __init__(self, target: Any, generate: Callable[..., Any]) -> None:
        self.target, self.generate = target, generate

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


def seeded(generation: Any, seeds: Sequence[int], num_generations: int) -> AbstractContextManager[None]:
    """Inside, TRL's `VLLMGeneration` samples the rows of this process with these seeds; no argument of it takes any.

    Args:
        seeds: one per row of this process.
        num_generations: rows per prompt, as in the call of `generate`.
    """
    if generation.mode == "colocate":
        if generation.tensor_parallel_size > 1:  # every rank of the group samples the rows of all of them
            parts = gather_in_group(list(seeds), generation.tp_group, generation.tensor_parallel_size)
            seeds = [seed for part in parts for seed in part]
        generate = functools.partial(_one_setting_per_row, generation.llm, seeds)
        return assigned(generation, llm=_WithGenerate(generation.llm, generate))
    seeds = gather_lists(list(seeds))
    if not generation.accelerator.is_main_process:
        return contextlib.nullcontext()
    generate = functools.partial(_one_request_per_prompt, generation.vllm_client, seeds[::num_generations])
    return assigned(generation, vllm_client=_WithGenerate(generation.vllm_client, generate))


def _one_setting_per_row(engine: Any, seeds: Sequence[int], prompts: Any, sampling_params: Any, **options: Any) -> Any:
    params_B = [sampling_params.clone() for _ in seeds]
    for params, seed in zip(params_B, seeds):
        params.seed = seed
    return engine.generate(prompts, sampling_params=params_B, **options)


def _one_request_per_prompt(
    client: Any, seeds: Sequence[int], prompts: Any, features: Any = None, **params: Any
) -> dict[str, Any]:
    """What a server answers; a request has one seed."""

    def send(index: int) -> dict[str, Any]:
        generation_kwargs = {**(params.get("generation_kwargs") or {}), "seed": seeds[index]}
        image = None if features is None else features[index : index + 1]
        options = {**params, "generation_kwargs": generation_kwargs}
        return client.generate(prompts=[prompts[index]], features=image, **options)

    with ThreadPoolExecutor(max_workers=min(_CONCURRENT, len(prompts))) as pool:
        answers = list(pool.map(send, range(len(prompts))))
    names = answers[0].keys()
    return {n: None if answers[0][n] is None else [row for answer in answers for row in answer[n]] for n in names}
