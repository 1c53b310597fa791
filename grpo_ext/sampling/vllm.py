"""vLLM engines: one seed per completion, from the same key as this package's own sampler.

Differs from TRL, which seeds an engine by the index of its process, so that completions depend on the number of
processes. `VllmEngine` calls TRL's `VLLMGeneration` for an engine in this process. `VllmServer` sends this process's
rows to a server, while TRL's main process sends the rows of all; so processes may have different numbers of rows, and a
thread may sample.

For replay vLLM returns the ids that tokens were sampled from, and experts (not run on a GPU). Masks come since 0.28,
from its Model Runner V2 (not on CPUs), for requests with a `top_k`; its log-probabilities are over the same tokens
(`logprobs_mode="processed_logprobs"`, as TRL starts an engine). Experts come for all layers, and for all tokens of
prompt and completion but the last. Where there are none (`compat.why_no_experts`), the forward of the policy's
log-probabilities records them.
"""

import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from ..algorithms.keyed_random import mix
from ..batching.sizes import ChunkSizes
from ..compat import is_batch_invariant, values_of
from ..errors import RolloutError
from ..forward.columns import EXPERTS
from ..forward.routing import BY_ROUTER, Router
from ..runtime.attributes import temporarily_set
from ..runtime.collectives import gather_in_group
from ..settings import most_kept, named, refuse_excluded, truncating
from .engine import Engine
from .engine_check import NEUTRAL
from .equal_shares import UNEQUAL_SHARES, refuse_unequal_shares
from .turn import Context, Turn, images_shown

_BITS = (1 << 62) - 1  # of a server's signed 64-bit seed, to which the index of a completion is added
SENT = (*(name for name in named("to_vllm") if name != "min_p"), "logprobs", "structured_outputs_regex")
# settings that leave tokens out too: masks describe them, but vLLM returns masks only with a `top_k`
_LEAVE_OUT = {"min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "vllm_structured_outputs_regex"}
_CONCURRENT = 256  # requests to a server at a time; it batches what has arrived


@dataclass(frozen=True)
class VllmEngine(Engine):
    generation: Any  # `sampling.vllm_weights.Generation`
    seeded: bool  # each completion has a seed of its own
    profile: Callable[[str], AbstractContextManager[Any]]  # TRL's profiling context of a name
    routers: Sequence[Router] = ()  # the model's, in the order of their columns; empty where no experts are returned

    def has_same_bits(self) -> bool:
        return is_batch_invariant(None)

    def generate(self, rows: Sequence[Context], config: GenerationConfig | None, sizes: ChunkSizes) -> list[Turn]:
        engines = self.generation.tensor_parallel_size
        if engines > 1 and not any(row.turns for row in rows):
            refuse_unequal_shares("vLLM", len(rows), UNEQUAL_SHARES)
        if not rows:
            return []
        seeds = seeds_of(rows, sizes.group) if self.seeded else None
        if seeds is not None and engines > 1:  # every rank of the group samples the rows of all ranks
            parts = gather_in_group(seeds, self.generation.tp_group, engines)
            seeds = [seed for part in parts for seed in part]
        llm = self.generation.llm
        prompts = [row.all_ids for row in rows]
        with temporarily_set(llm, seeds=seeds, completions=[]):
            returned = self.generation.generate(
                prompts=prompts,
                images=images_shown(rows),
                num_generations=sizes.group,
                profiler=self.profile("vLLM.generate"),
            )
            _, ids, logps, _ = values_of("generate", returned)
            first = self.generation.accelerator.process_index % engines * len(ids)  # among the rows of all ranks
            completions = llm.completions[first : first + len(ids)]
        sampled = sampled_of(self.generation, ids, logps, completions)
        if not self.routers:
            return sampled
        turns = []
        for turn, made, prompt in zip(sampled, completions, prompts, strict=True):
            experts_NC = experts_of(made, len(prompt) + len(turn.ids), self.routers)
            turns.append(replace(turn, columns={**turn.columns, EXPERTS: experts_NC}))
        return turns


@dataclass(frozen=True)
class VllmServer(Engine):
    generation: Any  # TRL's `VLLMGeneration`, for its settings
    client: Any  # this process's
    seeded: bool = True  # each completion has a seed of its own
    profile: Callable[[str], AbstractContextManager[Any]] = nullcontext

    def has_same_bits(self) -> bool:
        return is_batch_invariant(self.client)

    def generate(self, rows: Sequence[Context], config: GenerationConfig | None, sizes: ChunkSizes) -> list[Turn]:
        if not rows:
            return []
        settings, copies = self.generation, copies_of(rows, sizes.group)
        firsts = rows[::copies]
        prompts = [row.all_ids for row in firsts]
        features = None
        if (images := images_shown(firsts)) is not None:
            parts = self.client.image_features(images)
            features = [settings._place_features(part, ids) for part, ids in zip(parts, prompts, strict=True)]
        options = {name: getattr(settings, name) for name in SENT}
        options |= {"min_p": 0.0 if settings.min_p is None else settings.min_p, "n": copies}
        options["max_tokens"] = settings.max_completion_length
        seeds = seeds_of(rows, sizes.group)[::copies]

        def send(index: int) -> dict[str, Any]:  # a request has one seed
            further = (settings.generation_kwargs or {}) | ({"seed": seeds[index]} if self.seeded else {})
            image = None if features is None else features[index : index + 1]
            return self.client.generate(prompts=[prompts[index]], features=image, generation_kwargs=further, **options)

        with self.profile("vLLM.generate"), ThreadPoolExecutor(min(_CONCURRENT, len(prompts))) as pool:
            answers = list(pool.map(send, range(len(prompts))))
        ids = [row for answer in answers for row in answer["completion_ids"]]
        known = answers[0]["logprobs"] is not None
        logps = [row for answer in answers for row in answer["logprobs"]] if known else None
        return sampled_of(settings, ids, logps)


def copies_of(rows: Sequence[Context], num_generations: int) -> int:
    """`num_generations` where all rows of every group continue the same tokens, else 1."""
    groups = [rows[i : i + num_generations] for i in range(0, len(rows), num_generations)]
    shared = all(
        len(group) == num_generations
        and not any(row.ids for row in group)
        and all(row.prompt_ids == group[0].prompt_ids and row.images == group[0].images for row in group)
        for group in groups
    )
    return num_generations if shared else 1


def sampled_of(generation: Any, ids: Sequence[list[int]], logps: Any, completions: Sequence[Any] = ()) -> list[Turn]:
    """The turn of each row, with the log-probability of each sampled token, which vLLM lists first.

    `completions` are vLLM's objects of the rows; empty for a server, which does not report why a row ended.
    """
    values = [None] * len(ids) if logps is None else [[token[0] for token in row] for row in logps]
    kept: Sequence[Any] = [None] * len(ids)
    if generation.mask_bound is not None:
        kept = [mask_of(completion, row) for completion, row in zip(completions, ids, strict=True)]
    elif generation.unfiltered:
        kept = [[()] * len(row) for row in ids]
    reasons = [getattr(each, "finish_reason", None) for each in completions]
    if not reasons:  # a stop string ended rows that are shorter than the limit
        stops, limit = "stop" in (generation.generation_kwargs or {}), generation.max_completion_length
        reasons = ["stop" if stops and len(row) < limit else None for row in ids]
    ended = [None if reason is None else reason == "stop" for reason in reasons]
    return [Turn.of(*row) for row in zip(ids, values, kept, ended, strict=True)]


def seeds_of(rows: Sequence[Context], num_generations: int) -> list[int]:
    """The seeds of a turn, from the keys and the position of the first token that is sampled.

    In the first turn the completions of a group have consecutive seeds: vLLM gives the i-th of `n` completions the seed
    of the request plus i, so both modes sample the same. In a later turn each row has a seed of its own.
    """
    keys_B = torch.tensor([row.key for row in rows])
    offsets_B = torch.tensor([len(row.ids) for row in rows])
    if bool((offsets_B > 0).any()):
        return (mix(keys_B, offsets_B) & _BITS).tolist()
    firsts = keys_B[::num_generations].repeat_interleave(num_generations)[: len(keys_B)]
    return ((firsts & _BITS) + torch.arange(len(keys_B)) % num_generations).tolist()


# ---- Replay of masks and experts ------------------------------------------------------------------------------------


def vllm_filters(args: Any) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in named("truncates")} | (args.generation_kwargs or {})
    return truncating({**values, "top_k": max(values["top_k"] or 0, 0)})  # -1: all tokens


def other_scores(args: Any) -> list[str]:
    """The settings by which vLLM samples from other scores than those that training uses."""
    settings = {"repetition_penalty": args.repetition_penalty, **(args.generation_kwargs or {})}
    neutral = {"repetition_penalty": 1.0, "temperature": args.temperature}
    return [f"{name}={settings[name]!r}" for name, value in neutral.items() if settings.get(name, value) != value]


def mask_bound(args: Any, rollout_func: Any) -> int | None:
    """The most ids of a mask that vLLM is asked for; None: no masks are requested.

    A `rollout_func` returns `kept_ids` itself, and without filters no mask is needed.
    """
    if not (args.use_vllm and args.replay.masks) or rollout_func is not None:
        return None
    filters, settings = vllm_filters(args), args.generation_kwargs or {}
    settings = {**settings, "vllm_structured_outputs_regex": args.vllm_structured_outputs_regex}
    described = NEUTRAL | (_LEAVE_OUT if filters else set())
    undescribed = other_scores(args)
    undescribed += [f"{n}={value!r}" for n, value in settings.items() if value and n not in described]
    names = ", ".join(f"{name}={value}" for name, value in filters.items())
    facts = {"vllm_settings": ", ".join(undescribed), "server_filters": args.vllm_mode == "server" and names}
    remedy = "Leave one of the two out."
    if args.vllm_mode != "server":
        remedy += " Settings that leave tokens out, such as min_tokens, can be replayed with top_k."
    refuse_excluded("sampling_mask", "sampling_mask='replay'", facts, remedy)
    return most_kept(filters)


def mask_of(completion: Any, ids: list[int]) -> Sequence[Sequence[int]]:
    """The ids that each token was sampled from."""
    returned, mask = "none", getattr(completion, "sampling_mask", None)
    if mask is not None:
        returned = f"{len(mask.token_ids)}, or some without the token that was sampled,"
        if len(mask.token_ids) == len(ids) and all(map(operator.contains, mask.token_ids, ids)):
            return mask.token_ids
    raise RolloutError(
        f"sampling_mask='replay': vLLM was asked for the ids that each token was sampled from "
        f"(return_sampling_mask=True), and returned {returned} for a completion of {len(ids)} tokens; use a vLLM whose "
        "model runner returns them, or leave sampling_mask or the filters out."
    )


def experts_of(completion: Any, tokens: int, routers: Sequence[Router]) -> torch.Tensor:
    """The experts (tokens, C) of a prompt and one of vLLM's completions; `BY_ROUTER` for the last, which never ran."""
    routed = getattr(completion, "routed_experts", None)
    layers, experts = [router.layer for router in routers], [router.experts for router in routers]
    returned, choices = "none", routers[0].choices
    if routed is not None:  # an array [tokens - 1, decoder layers, K]
        shape = tuple(routed.shape)
        returned = f"an array {shape}, where routers of layers {layers} make {choices} choices,"
        fits = len(shape) == 3 and shape[0] == tokens - 1 and min(layers) >= 0 and max(layers) < shape[1]
        if fits and len(layers) * shape[2] == choices:
            experts_NRK = torch.from_numpy(routed[:, layers].astype("int32"))
            ordered_NRK = experts_NRK.sort(-1).values
            unknown_NR = (ordered_NRK[..., 0] < 0) | (ordered_NRK[..., -1] >= torch.tensor(experts))
            unknown_NR |= (ordered_NRK[..., 1:] == ordered_NRK[..., :-1]).any(-1)
            if not unknown_NR.any():
                dtype = max(routers, key=lambda router: router.experts).dtype
                return torch.nn.functional.pad(experts_NRK.flatten(1).to(dtype), (0, 0, 0, 1), value=BY_ROUTER)
            returned = f"{experts_NRK[unknown_NR][0].tolist()} as a choice of different experts out of {max(experts)},"
    raise RolloutError(
        "routing_replay=True: vLLM was asked for the experts of every token but the last "
        f"(enable_return_routed_experts=True), and returned {returned} for {tokens} tokens of prompt and completion; "
        "use another version of vLLM, or vllm_mode='server', where they are recorded with the log-probabilities, or "
        "leave routing_replay out."
    )
