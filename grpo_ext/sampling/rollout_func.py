"""A user's `rollout_func`, checked: what it returns becomes the rollout batch, or is an error on every process.

Differs from TRL, which believes what it is given: too few rows end in an index error, and an exception on one process
leaves the others waiting. Called by TRL's `_generate` in the place of generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import RolloutError
from ..runtime.collectives import gather_lists

if TYPE_CHECKING:
    from .sampler import RolloutSampler

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_REMEDY = (
    "It takes (prompts, trainer) and returns a dictionary with prompt_ids and completion_ids, one list of token ids "
    "for each prompt, and logprobs, one list of numbers for each prompt or None; further lists (env_mask: 1 for each "
    "token of the model, 0 for others) have one entry for each prompt too."
)


class CheckedRollout:
    """Calls `function(prompts, trainer)` with this process's prompts, each repeated once per completion, as TRL does.

    Every process comes here together and calls it, so that it may hold collectives: one without prompts does so with a
    prompt of another process, and no result contains what it returns.

    Args:
        function: the user's; `__wrapped__` afterwards.
        sampler: makes the rollout batch.
        needs_logprobs: why log-probabilities are needed, as a sentence; None where they are not.
    """

    def __init__(
        self,
        function: Callable[..., Mapping[str, Any]],
        sampler: Callable[[], RolloutSampler],
        needs_logprobs: str | None = None,
    ) -> None:
        self.__wrapped__, self.sampler, self.needs_logprobs = function, sampler, needs_logprobs

    def __getattr__(self, name: str) -> Any:  # the function's own attributes
        return getattr(vars(self)["__wrapped__"], name)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's output dictionary, in lists of plain numbers.

        Raises:
            RolloutError: on every process, where the function failed or returned something else on one of them.
        """
        sampler = self.sampler()
        self._check_counts(sampler, len(prompts))
        output, failure, cause = None, None, None
        try:
            with sampler.outside():
                output = self.__wrapped__(prompts, trainer)
        except Exception as error:  # raised below, once the other processes know of it
            failure, cause = f"raised {type(error).__name__}: {error}", error
        else:
            failure = _what_is_wrong(output, len(prompts))
            failure = None if failure is None else f"{failure}. {_REMEDY}"
        found = {} if output is None or failure else _plain(output)
        everyone = gather_lists([(failure, found.get("logprobs") is not None, "env_mask" in found)])
        for rank, (reason, _, _) in enumerate(everyone):
            if reason is not None:
                where = f"on process {rank}, rollout_func" if len(everyone) > 1 else "rollout_func"
                raise RolloutError(f"{where} {reason}") from cause
        with_logprobs = {logprobs for _, logprobs, _ in everyone}
        if len(with_logprobs) > 1:
            raise RolloutError(f"rollout_func returned logprobs on some processes and None on others. {_REMEDY}")
        if self.needs_logprobs is not None and with_logprobs == {False}:
            raise RolloutError(f"rollout_func returned logprobs=None, and {self.needs_logprobs}.")
        if any(mask for _, _, mask in everyone) and "env_mask" not in found:
            found["env_mask"] = [[1] * len(ids) for ids in found["completion_ids"]]
        if sampler.call is not None:  # tools may go on with these rows
            prompt_ids, completions = found["prompt_ids"], found["completion_ids"]
            found["completion_ids"] = sampler.call.remember(range(len(prompt_ids)), prompt_ids, completions)
        return found

    def _check_counts(self, sampler: RolloutSampler, prompts: int) -> None:
        if sampler.why_equal is None:
            return
        counts = gather_lists([prompts])
        if len(set(counts)) > 1:
            raise RolloutError(
                f"rollout_func would get {min(counts)} to {max(counts)} prompts on this number of processes, and "
                f"{sampler.why_equal}; use a number of prompts (also for evaluation) that they share evenly."
            )


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
    for row, (own, ids) in enumerate(zip(() if values is None else values, completion_ids)):
        count = len(own) if hasattr(own, "__len__") else own
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
