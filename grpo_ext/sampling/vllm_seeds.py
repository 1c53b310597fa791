"""vLLM rollouts with one seed per completion, from the same key as this package's own sampler, and their statistics.

Differs from TRL, which seeds an engine by the index of its process, so that completions follow from how many there are,
and logs means of the processes' means. Here statistics are those of all tokens of the rollout batch.
Called by the trainer around TRL's `VLLMGeneration.generate`, in both of its modes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..algorithms.keyed_random import mix
from ..compat import View, on_view
from ..rollouts.batch import RolloutBatch
from ..runtime.collectives import gather_in_group, gather_lists

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


def seeded(generation: Any, seeds: Sequence[int], num_generations: int) -> Any:
    """A `VLLMGeneration` seen so that it samples this process's rows with these seeds.

    Args:
        generation: TRL's `VLLMGeneration`, which stays as it is.
        seeds: one per row of this process.
        num_generations: rows per prompt, as `generate` is told.
    """
    if generation.mode == "colocate":
        rows = list(seeds)
        if generation.tensor_parallel_size > 1:  # every rank of the group samples the rows of all of them
            parts = gather_in_group(rows, generation.tp_group, generation.tensor_parallel_size)
            rows = [seed for part in parts for seed in part]
        engine = View(generation.llm, {"generate": functools.partial(_generate_seeded, generation.llm, rows)})
        return _generating_with(generation, {"llm": engine})
    everyone = gather_lists(list(seeds))
    if not generation.accelerator.is_main_process:
        return generation
    firsts = everyone[::num_generations]
    client = generation.vllm_client
    ask = functools.partial(_ask_one_by_one, client, firsts)
    return _generating_with(generation, {"vllm_client": View(client, {"generate": ask})})


def _generating_with(generation: Any, instead: dict[str, Any]) -> View:
    return View(generation, {"generate": functools.partial(on_view, generation.generate, instead)})


def _generate_seeded(engine: Any, seeds: Sequence[int], prompts: Any, sampling_params: Any, **options: Any) -> Any:
    params = [sampling_params.clone() for _ in seeds]
    for own, seed in zip(params, seeds):
        own.seed = seed
    return engine.generate(prompts, sampling_params=params, **options)


def _ask_one_by_one(
    client: Any, seeds: Sequence[int], prompts: Any, features: Any = None, **params: Any
) -> dict[str, Any]:
    """One request per prompt, because a request has one seed."""

    def send(index: int) -> dict[str, Any]:
        generation_kwargs = {**(params.get("generation_kwargs") or {}), "seed": seeds[index]}
        image = None if features is None else features[index : index + 1]
        options = {**params, "generation_kwargs": generation_kwargs}
        return client.generate(prompts=[prompts[index]], features=image, **options)

    with ThreadPoolExecutor(max_workers=min(_CONCURRENT, len(prompts))) as pool:
        answers = list(pool.map(send, range(len(prompts))))
    names = answers[0].keys()
    return {n: None if answers[0][n] is None else [row for answer in answers for row in answer[n]] for n in names}


_CORRECTED = ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")


def sampling_metrics(rollouts: Sequence[RolloutBatch], level: str | None) -> dict[str, float]:
    """TRL's log values of how far vLLM's log-probabilities are from the trainer's, over all completions.

    Tokens that carry no loss, and differences that vLLM could not tell (NaN), do not count. A value is 0 where nothing
    counts, as in TRL.

    Args:
        rollouts: the rollout batch, or the rounds it was sampled in, the same on every process.
        level: TRL's `vllm_importance_sampling_mode`: one ratio for each completion ("sequence_...") or each token; None
            without vLLM.

    Returns:
        Nothing where the difference is not corrected, and so not known.
    """
    if level is None or not all(rollout.importance_sampling_ratio is not None for rollout in rollouts):
        return {}
    deltas, ratios = [], []
    for rollout in rollouts:
        old, sampling, ratio_of = (getattr(rollout, name) for name in _CORRECTED)
        for one, other, ratio, mask in zip(old, sampling, ratio_of, rollout.loss_masks):
            mask = mask.bool()
            delta = (one - other).abs()[mask]
            deltas.append(delta[~delta.isnan()])
            ratios.append(ratio if level.startswith("sequence") else ratio[mask])
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
