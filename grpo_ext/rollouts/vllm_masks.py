"""The tokens that vLLM sampled from, for `sampling_mask="replay"`: when it is asked for them, and what is refused.

vLLM returns them since 0.28, with its Model Runner V2 (not on CPUs), for requests with a `top_k`. Its log-probabilities
are over the same tokens: TRL starts an engine with `logprobs_mode="processed_logprobs"`, those after temperature and
filters, and vLLM returns masks in no other mode. Called by rollouts.build and rollouts.vllm. Not run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import RolloutError, refuse_combination
from .engine_check import NEUTRAL
from .keyed import truncating
from .token_record import TokenRecord

# settings that leave tokens out too: masks describe them, but vLLM returns masks with a `top_k` alone
_LEAVE_OUT = {"min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "vllm_structured_outputs_regex"}


def vllm_filters(args: Any) -> dict[str, Any]:
    """The settings of vLLM's sampling that leave out unlikely tokens."""
    values = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p")} | (args.generation_kwargs or {})
    return truncating({**values, "top_k": max(values["top_k"] or 0, 0)})  # -1: all tokens


def replayed_filters(args: Any, rollout_func: Any) -> dict[str, Any] | None:
    """The filters whose masks vLLM is asked for; empty where it samples from the whole vocabulary.

    None: nothing is replayed, or not what vLLM samples, because a `rollout_func` returns its own `kept_ids`.

    Raises:
        ConfigError: vLLM returns no masks that describe this sampling.
    """
    if not (args.use_vllm and args.replays_masks):
        return None
    filters = vllm_filters(args)
    if rollout_func is not None:
        return None if filters else {}
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
        remedy += " Settings that leave tokens out, as min_tokens, can be replayed with top_k."
    refuse_combination("sampling_mask='replay'", others, remedy)
    return filters


def mask_record(ids: list[int], logps: list[float | None] | None, kept_ids: list[list[int]] | None) -> TokenRecord:
    """The record of a completion from vLLM.

    Args:
        kept_ids: of each token the ids that it was sampled from; None: not returned.

    Raises:
        RolloutError: the ids are missing, of another length, or do not contain the sampled token.
    """
    if kept_ids is not None and len(kept_ids) == len(ids):
        record = TokenRecord.of_kept(kept_ids, logps)
        token_K = torch.arange(len(ids)).repeat_interleave(record.counts_T)
        if len(token_K[record.ids_K == torch.tensor(ids)[token_K]].unique()) == len(ids):
            return record
    returned = "none" if kept_ids is None else f"{len(kept_ids)}, or some without the token that was sampled,"
    raise RolloutError(
        f"sampling_mask='replay': vLLM was told to return the ids that each token was sampled from "
        f"(return_sampling_mask=True), and returned {returned} for a completion of {len(ids)} tokens; use a vLLM whose "
        "model runner returns them, or leave sampling_mask or the filters out."
    )
