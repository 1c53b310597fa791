"""Checks what a user's `rollout_func` returns: it becomes completions, or an error says what is wrong.

Differs from TRL, where too few rows end in an index error. The worker calls it in the place of the first turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RolloutError

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_REMEDY = (
    "It takes (prompts, trainer) and returns a dictionary with prompt_ids and completion_ids, one list of token ids "
    "for each prompt, and logprobs, one list of numbers for each prompt or None; further lists (env_mask: 1 for each "
    "token of the model, 0 for others) have one entry for each prompt too."
)
_KEPT_REMEDY = (
    " With sampling_mask='replay' it returns kept_ids: for each completion one list of ids for each token, those that "
    "it was sampled from, empty for the whole vocabulary and for tokens of tools."
)


def checked_rollout(output: Any, prompts: int, needs_logprobs: str | None, kept_ids: bool = False) -> dict[str, Any]:
    """What a `rollout_func` returned, in plain numbers; raises a RolloutError for anything but a rollout.

    Args:
        prompts: how many it was called with, each repeated once per completion.
        needs_logprobs: why log-probabilities are needed, as a sentence; None where they are not.
        kept_ids: the ids that each token was sampled from are needed too.
    """
    remedy = _REMEDY + (_KEPT_REMEDY if kept_ids else "")
    if not isinstance(output, Mapping):
        raise RolloutError(f"rollout_func returned a {type(output).__name__} in the place of a dictionary. {remedy}")
    missing = [name for name in _REQUIRED if name not in output]
    missing += [name for name in ("prompt_ids", "completion_ids") if output.get(name, ()) is None]
    if missing:
        raise RolloutError(f"rollout_func returned no {', '.join(missing)}. {remedy}")
    if needs_logprobs is not None and output["logprobs"] is None:
        raise RolloutError(f"rollout_func returned logprobs=None, and {needs_logprobs}.")
    rollout = {name: values for name, values in output.items() if name != "env_mask" or values is not None}
    for name in (*_REQUIRED, "env_mask"):
        if rollout.get(name) is not None:
            rollout[name] = [[_plain(name, value) for value in row] for row in rollout[name]]
    if kept_ids:
        try:
            rollout["kept_ids"] = [[[int(i) for i in among] for among in row] for row in rollout["kept_ids"]]
        except (KeyError, TypeError, ValueError):
            raise RolloutError(f"rollout_func returned no kept_ids. {remedy}") from None
    for name, values in rollout.items():
        if isinstance(values, list) and len(values) != prompts:
            raise RolloutError(f"rollout_func returned {len(values)} {name} for {prompts} prompts. {remedy}")
    for row, ids in enumerate(rollout["completion_ids"]):
        if not ids or not rollout["prompt_ids"][row]:
            raise RolloutError(f"rollout_func returned no tokens of prompt or completion in row {row}. {remedy}")
        for name in ("logprobs", "env_mask", *(["kept_ids"] if kept_ids else [])):
            values = rollout.get(name)
            if values is not None and len(values[row]) != len(ids):
                raise RolloutError(
                    f"rollout_func returned {len(values[row])} {name} for the {len(ids)} tokens of completion {row}. "
                    f"{remedy}"
                )
        for place, (token, among) in enumerate(zip(ids, rollout["kept_ids"][row] if kept_ids else ())):
            if among and (token not in among or not 0 <= min(among) <= max(among) < 2**31):
                raise RolloutError(
                    f"kept_ids of rollout_func do not contain token {token}, or contain something other than an id, at "
                    f"place {place} of completion {row}. {remedy}"
                )
    return rollout


def _plain(name: str, value: Any) -> Any:
    if name != "logprobs":
        return int(value)
    return None if value is None else float(value)  # vLLM does not report all of them
