"""A user's `rollout_func`, checked: what it returns becomes completions, or is an error that says what is wrong.

Differs from TRL, which believes what it is given: too few rows end in an index error. Called by the worker in the place
of the first turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import RolloutError
from ..runtime.collectives import gather_lists

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_REMEDY = (
    "It takes (prompts, trainer) and returns a dictionary with prompt_ids and completion_ids, one list of token ids "
    "for each prompt, and logprobs, one list of numbers for each prompt or None; further lists (env_mask: 1 for each "
    "token of the model, 0 for others) have one entry for each prompt too."
)


def checked_rollout(
    function: Callable[..., Mapping[str, Any]], prompts: list[Any], trainer: Any, needs_logprobs: str | None
) -> dict[str, Any]:
    """What `function(prompts, trainer)` returns for this process's prompts, in lists of plain numbers.

    Args:
        prompts: each repeated once per completion, as TRL has them.
        needs_logprobs: why log-probabilities are needed, as a sentence; None where they are not.

    Raises:
        RolloutError: the function failed or returned something else.
    """
    try:
        output = function(prompts, trainer)
    except Exception as error:
        raise RolloutError(f"rollout_func raised {type(error).__name__}: {error}") from error
    if (fault := _what_is_wrong(output, len(prompts))) is not None:
        raise RolloutError(f"rollout_func {fault}. {_REMEDY}")
    plain = _plain(output)
    if needs_logprobs is not None and plain.get("logprobs") is None:
        raise RolloutError(f"rollout_func returned logprobs=None, and {needs_logprobs}.")
    return plain


def _what_is_wrong(output: Any, rows: int) -> str | None:
    """What TRL could not take of an output, as the rest of a sentence; None if nothing."""
    if not isinstance(output, Mapping):
        return f"returned a {type(output).__name__} in the place of a dictionary"
    missing = [name for name in _REQUIRED if name not in output]
    if missing:
        return f"returned no {', '.join(missing)}"
    for name, values in output.items():
        if name in ("logprobs", "env_mask") and values is None:
            continue
        sized = hasattr(values, "__len__")
        per_prompt = isinstance(values, list) or name in (*_REQUIRED, "env_mask")
        if per_prompt and not (sized and len(values) == rows):
            return f"returned {len(values) if sized else values} {name} for {rows} prompts"
    for name in ("prompt_ids", "completion_ids"):
        short = next((row for row, ids in enumerate(output[name]) if not len(ids)), None)
        if short is not None:
            return f"returned no tokens in row {short} of {name}"
    for name in ("logprobs", "env_mask"):
        if (reason := _other_lengths(name, output.get(name), output["completion_ids"])) is not None:
            return reason
    return None


def _other_lengths(name: str, values: Any, completion_ids: Sequence[Any]) -> str | None:
    for row, (entries, ids) in enumerate(zip(() if values is None else values, completion_ids)):
        count = len(entries) if hasattr(entries, "__len__") else entries
        if count != len(ids):
            return f"returned {count} {name} for the {len(ids)} tokens of completion {row}"
    return None


def _plain(output: Mapping[str, Any]) -> dict[str, Any]:
    """The output with lists of plain numbers, so that every process makes tensors of the same types of them."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "prompt_ids": int,
        "completion_ids": int,
        "env_mask": int,
        "logprobs": lambda value: None if value is None else float(value),  # vLLM cannot tell each of them
    }
    plain = {name: values for name, values in output.items() if name != "env_mask" or values is not None}
    for name, kind in kinds.items():
        if plain.get(name) is not None:
            rows = [row.tolist() if isinstance(row, torch.Tensor) else row for row in plain[name]]
            plain[name] = [[kind(value) for value in row] for row in rows]
    return plain


def why_equal(args: Any, sharded: bool) -> str | None:
    """Why processes need as many prompts to generate together, as the rest of a sentence; None if they do not."""
    if sharded:
        return "a forward of a sharded model is a collective"
    if args.use_vllm and (args.vllm_mode == "server" or args.vllm_tensor_parallel_size > 1):
        return "vLLM cuts what several processes sampled together as if all had as many"
    return None


def refuse_unequal_prompts(prompts: int, reason: str | None) -> None:
    """Refuse a number of prompts that a `rollout_func` could not generate for together with the other processes.

    Args:
        reason: why they need as many (`why_equal`).

    Raises:
        RolloutError: on every process.
    """
    if reason is None:
        return
    counts = gather_lists([prompts])
    if len(set(counts)) > 1:
        raise RolloutError(
            f"rollout_func would get {min(counts)} to {max(counts)} prompts on this number of processes, and "
            f"{reason}; use a number of prompts (also for evaluation) that they share evenly."
        )
