"""vLLM rollouts with one seed per completion, from the same key as this package's own sampler, and their statistics.

Differs from TRL, which seeds an engine by the index of its process, so that completions follow from how many there are,
and logs means of the processes' means. Here statistics are those of all tokens of the rollout batch.
Called by the trainer around TRL's `VLLMGeneration.generate`, in both of its modes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from ..algorithms.keyed_random import mix
from ..runtime.collectives import gather_in_group, gather_lists
from .rollout import Rollout

_BITS = (1 << 62) - 1  # what a server's 64-bit seed holds, with room for the index of a completion
_CONCURRENT = 256  # requests to a server at a time; it batches what has arrived


def completion_seeds(keys_B: torch.Tensor, offsets_B: torch.Tensor, num_generations: int) -> list[int]:
    """Seeds of rows, from their keys and the position of the first token that is sampled.

    In the first turn the completions of a group have consecutive seeds, because vLLM gives the i-th of `n` completions
    the seed of the request plus i; so both modes sample the same. In a later turn each row has a seed of its own.
    """
    if bool((offsets_B > 0).any()):
        return (mix(keys_B, offsets_B) & _BITS).tolist()
    firsts = keys_B[::num_generations].repeat_interleave(num_generations)[: len(keys_B)]
    return ((firsts & _BITS) + torch.arange(len(keys_B)) % num_generations).tolist()


def _seeded_params(params: Any, seeds: Sequence[int]) -> list[Any]:
    copies = [params.clone() for _ in seeds]
    for copy, seed in zip(copies, seeds):
        copy.seed = seed
    return copies


@contextmanager
def seeded(generation: Any, seeds: Sequence[int], num_generations: int) -> Iterator[None]:
    """Inside, a `VLLMGeneration` samples this process's rows with these seeds.

    Args:
        generation: TRL's `VLLMGeneration`.
        seeds: one per row of this process.
        num_generations: rows per prompt, as `generate` is told.
    """
    if generation.mode == "colocate":
        shared = list(seeds)
        if generation.tensor_parallel_size > 1:  # every rank of the group samples the rows of all of them
            parts = gather_in_group(list(seeds), generation.tp_group, generation.tensor_parallel_size)
            shared = [seed for part in parts for seed in part]
        inner = generation.llm.generate

        def generate(prompts: Any, sampling_params: Any, **options: Any) -> Any:
            return inner(prompts, sampling_params=_seeded_params(sampling_params, shared), **options)

        with mock.patch.object(generation.llm, "generate", generate):
            yield
        return
    everyone = gather_lists(list(seeds))
    if not generation.accelerator.is_main_process:
        yield
        return
    ask = generation.vllm_client.generate

    def generate_each(prompts: Any, features: Any = None, **params: Any) -> dict[str, Any]:
        """One request per prompt, because a request has one seed."""

        def send(index: int) -> dict[str, Any]:
            seed = {"seed": everyone[index * num_generations]}
            options = {**params, "generation_kwargs": {**(params.get("generation_kwargs") or {}), **seed}}
            image = None if features is None else features[index : index + 1]
            return ask(prompts=[prompts[index]], features=image, **options)

        with ThreadPoolExecutor(max_workers=min(_CONCURRENT, len(prompts))) as pool:
            answers = list(pool.map(send, range(len(prompts))))
        names = answers[0].keys()
        return {n: None if answers[0][n] is None else [row for answer in answers for row in answer[n]] for n in names}

    with mock.patch.object(generation.vllm_client, "generate", generate_each):
        yield


def sampling_metrics(rollouts: Sequence[Rollout], sequence_level: bool) -> dict[str, float]:
    """TRL's log values of how far vLLM's log-probabilities are from the trainer's, over all completions.

    Tokens that carry no loss, and differences that vLLM could not tell (NaN), do not count. A value is 0 where nothing
    counts, as in TRL.

    Args:
        rollouts: the rollout batch, or the rounds it was sampled in, the same on every process.
        sequence_level: whether there is one ratio for each completion, instead of one for each token.

    Returns:
        Nothing where the difference is not corrected, and so not known.
    """
    if not all("importance_sampling_ratio" in rollout.fields for rollout in rollouts):
        return {}
    deltas, ratios = [], []
    for rollout in rollouts:
        fields = rollout.fields
        for row, ratio in enumerate(fields["importance_sampling_ratio"]):
            mask = rollout.loss_mask(row).bool()
            delta = (fields["old_per_token_logps"][row] - fields["sampling_per_token_logps"][row]).abs()[mask]
            deltas.append(delta[~delta.isnan()])
            ratios.append(ratio if sequence_level else ratio[mask])
    delta, ratio = torch.cat(deltas).double(), torch.cat(ratios).double()
    ratio = ratio[~ratio.isnan()]
    delta, ratio = (values if len(values) else torch.zeros(1) for values in (delta, ratio))
    return {
        "sampling/sampling_logp_difference/mean": delta.mean().item(),
        "sampling/sampling_logp_difference/max": delta.max().item(),
        "sampling/importance_sampling_ratio/min": ratio.min().item(),
        "sampling/importance_sampling_ratio/mean": ratio.mean().item(),
        "sampling/importance_sampling_ratio/max": ratio.max().item(),
    }
