"""Which tokens vLLM sampled from, for `sampling_mask="replay"`: when it is asked for them, and what is refused.

vLLM returns them since 0.28, where its Model Runner V2 runs (not on CPUs), for requests with a `top_k`. With them its
log-probabilities are over the same tokens: TRL starts an engine with `logprobs_mode="processed_logprobs"`, those after
temperature and filters, and vLLM refuses any other mode. Called by rollouts.vllm_weights and rollouts.build. Not run on
a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import ConfigError, RolloutError
from .engine_check import NEUTRAL
from .keyed import truncating
from .token_record import TokenRecord
from .transcript import Sampled

# parameters of vLLM that leave tokens out too, which masks describe
_LEAVE_OUT = ("min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "vllm_structured_outputs_regex")


def vllm_filters(args: Any) -> dict[str, Any]:
    """The settings of vLLM's sampling that leave out unlikely tokens."""
    values = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p")} | (args.generation_kwargs or {})
    return truncating({**values, "top_k": max(values["top_k"] or 0, 0)})  # -1: all tokens


def replayed_filters(args: Any, rollout_func: Any) -> dict[str, Any] | None:
    """The filters whose masks vLLM is asked for; empty where it samples from the whole vocabulary.

    None: nothing is replayed, or not what vLLM samples: a `rollout_func` returns its own `kept_ids`.

    Raises:
        ConfigError: masks are replayed, and vLLM does not return what describes the sampling.
    """
    if not (args.use_vllm and args.replays_masks):
        return None
    filters = vllm_filters(args)
    if rollout_func is not None:
        return None if filters else {}
    if filters and args.vllm_mode == "server":
        names = ", ".join(f"{name}={value}" for name, value in filters.items())
        raise ConfigError(
            f"sampling_mask='replay' and {names}: TRL's client of a vLLM server does not pass on which tokens were "
            "kept; use vllm_mode='colocate', sample without these filters, or leave sampling_mask out."
        )
    _refuse_other_changes(args, filters)
    return filters


def _refuse_other_changes(args: Any, filters: Mapping[str, Any]) -> None:
    """Refuse settings that no mask describes, or none that vLLM returns."""
    settings = {"repetition_penalty": args.repetition_penalty, **(args.generation_kwargs or {})}
    settings["vllm_structured_outputs_regex"] = args.vllm_structured_outputs_regex
    without_effect = {"repetition_penalty": 1.0, "temperature": args.temperature}
    neutral = NEUTRAL - without_effect.keys()
    for name, value in settings.items():
        absent = value in (None, "", [], {}) or value == without_effect.get(name, 0)
        if absent or name in neutral or (filters and name in _LEAVE_OUT):
            continue
        remedy = "set top_k too, with which vLLM returns masks" if name in _LEAVE_OUT else "leave one of the two out"
        raise ConfigError(
            f"sampling_mask='replay' and {name}={value!r}: vLLM changes the scores of tokens by more than leaving out "
            f"those that top_p, top_k and min_p do, and returns no mask that describes it; {remedy}."
        )


def recorded(
    sampled: Sequence[Sampled], replayed: Mapping[str, Any] | None, kept_ids: Sequence[Any] = ()
) -> list[Sampled]:
    """What vLLM sampled, with the record of its tokens.

    Args:
        replayed: see `replayed_filters`; without filters every token was sampled from the whole vocabulary.
        kept_ids: of each completion the ids that its tokens were sampled from; None: not returned.

    Raises:
        RolloutError: vLLM did not return the ids, or not for every token, or without the token itself.
    """
    if replayed is None:
        return list(sampled)
    if not replayed:
        kept_ids = [[()] * len(turn.ids) for turn in sampled]
    return [replace(turn, record=_record(turn, kept, bool(replayed))) for turn, kept in zip(sampled, kept_ids)]


def _record(turn: Sampled, kept_ids: Any, filtered: bool) -> TokenRecord:
    tokens, problem = len(turn.ids), "none"
    if kept_ids is not None and len(kept_ids) != tokens:
        problem = f"those of {len(kept_ids)}"
    elif kept_ids is not None:
        record = TokenRecord.of_kept(kept_ids, turn.logps)
        sampled_K = torch.tensor(turn.ids).repeat_interleave(record.counts_T)
        if not filtered or int((record.ids_K == sampled_K).sum()) == tokens:
            return record
        problem = "some without the token that was sampled"
    raise RolloutError(
        f"sampling_mask='replay': vLLM was told to return the tokens that it kept (return_sampling_mask=True), and of "
        f"a completion of {tokens} tokens returned {problem}; use another version or platform of vLLM, sample "
        "without filters, or leave sampling_mask out."
    )
