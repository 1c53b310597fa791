"""Reads what vLLM returns for replay: the ids that tokens were sampled from, and experts. Not run on a GPU.

vLLM returns masks since 0.28, with its Model Runner V2 (not on CPUs), for requests with a `top_k`; its
log-probabilities are over the same tokens (`logprobs_mode="processed_logprobs"`, as TRL starts an engine). It returns
the experts of all layers, for all tokens of prompt and completion but the last. Where it returns none
(`compat.why_no_experts`), the forward of the policy's log-probabilities records them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import RolloutError, refuse_combination
from ..forward.routing import LIVE, Router
from .engine_check import NEUTRAL
from .keyed import most_kept, truncating
from .token_record import TokenRecord

# settings that leave tokens out too: masks describe them, but vLLM returns masks only with a `top_k`
_LEAVE_OUT = {"min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "vllm_structured_outputs_regex"}


def vllm_filters(args: Any) -> dict[str, Any]:
    """The settings of vLLM's sampling that leave out unlikely tokens."""
    values = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p")} | (args.generation_kwargs or {})
    return truncating({**values, "top_k": max(values["top_k"] or 0, 0)})  # -1: all tokens


def mask_bound(args: Any, rollout_func: Any) -> int | None:
    """The most ids of a mask that vLLM is asked for; None: no masks are requested.

    A `rollout_func` returns `kept_ids` itself, and without filters no mask is needed.

    Raises:
        ConfigError: vLLM returns no masks that describe this sampling.
    """
    if not (args.use_vllm and args.replay.masks) or rollout_func is not None:
        return None
    filters = vllm_filters(args)
    regex = {"vllm_structured_outputs_regex": args.vllm_structured_outputs_regex}
    settings = {"repetition_penalty": args.repetition_penalty, **(args.generation_kwargs or {}), **regex}
    without_effect = {"repetition_penalty": 1.0, "temperature": args.temperature}
    described = NEUTRAL - without_effect.keys() | (_LEAVE_OUT if filters else set())
    others: dict[str, Any] = {
        f"{name}={value!r} (vLLM returns no masks that describe it)": value or name == "temperature"
        for name, value in settings.items()
        if name not in described and value != without_effect.get(name)
    }
    names = ", ".join(f"{name}={value}" for name, value in filters.items())
    others[f"{names} on a vLLM server (TRL's client returns no masks)"] = filters and args.vllm_mode == "server"
    remedy = "Leave one of the two out."
    if args.vllm_mode != "server":
        remedy += " Settings that leave tokens out, such as min_tokens, can be replayed with top_k."
    refuse_combination("sampling_mask='replay'", others, remedy)
    return most_kept(filters)


def mask_record(completion: Any, ids: list[int], logps: list[float | None] | None) -> TokenRecord:
    """The record of one of vLLM's completions; a RolloutError where its mask is missing or does not fit the tokens."""
    returned, mask = "none", getattr(completion, "sampling_mask", None)
    if mask is not None:
        returned = f"{len(mask.token_ids)}, or some without the token that was sampled,"
        if len(mask.token_ids) == len(ids) and all(map(operator.contains, mask.token_ids, ids)):
            return TokenRecord.of_kept(mask.token_ids, logps)
    raise RolloutError(
        f"sampling_mask='replay': vLLM was asked for the ids that each token was sampled from "
        f"(return_sampling_mask=True), and returned {returned} for a completion of {len(ids)} tokens; use a vLLM whose "
        "model runner returns them, or leave sampling_mask or the filters out."
    )


def experts_of(completion: Any, tokens: int, routers: Sequence[Router]) -> torch.Tensor:
    """The experts (tokens, C) of a prompt and one of vLLM's completions; `LIVE` for the last token, which never ran.

    Raises:
        RolloutError: vLLM's array [tokens - 1, decoder layers, K] is missing, or not a choice of these routers.
    """
    routed = getattr(completion, "routed_experts", None)
    layers, experts = [router.layer for router in routers], [router.experts for router in routers]
    returned, choices = "none", routers[0].choices
    if routed is not None:
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
                return torch.nn.functional.pad(experts_NRK.flatten(1).to(dtype), (0, 0, 0, 1), value=LIVE)
            returned = f"{experts_NRK[unknown_NR][0].tolist()} as a choice of different experts out of {max(experts)},"
    raise RolloutError(
        "routing_replay=True: vLLM was asked for the experts of every token but the last "
        f"(enable_return_routed_experts=True), and returned {returned} for {tokens} tokens of prompt and completion; "
        "use another version of vLLM, or vllm_mode='server', where they are recorded with the log-probabilities, or "
        "leave routing_replay out."
    )
