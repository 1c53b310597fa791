"""A user's `rollout_func`, checked: what it returns becomes the rollout batch, or is an error on every process.

Differs from TRL, which believes what it is given: too few rows end in an index error, and an exception on one process
leaves the others waiting. Called by TRL's `_generate` in the place of generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import RolloutError
from ..runtime.collectives import gather_lists

if TYPE_CHECKING:
    from .sampler import RolloutSampler

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


class CheckedRollout:
    """Calls `function(prompts, trainer)` with this process's prompts, each repeated once per completion, as TRL does.

    A process without prompts does not call it. Every process comes here together.

    Args:
        function: the user's; `__wrapped__` afterwards.
        sampler: makes the rollout batch.
        needs_logprobs: why log-probabilities are needed, as a sentence; None where they are not.
    """

    def __init__(
        self,
        function: Callable[..., dict[str, Any]],
        sampler: Callable[[], RolloutSampler],
        needs_logprobs: str | None = None,
    ) -> None:
        self.__wrapped__, self.sampler, self.needs_logprobs = function, sampler, needs_logprobs

    def __getattr__(self, name: str) -> Any:  # of what is not found here
        return getattr(vars(self)["__wrapped__"], name)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's output dictionary.

        Raises:
            RolloutError: on every process, where the function failed or returned something else on one of them.
        """
        sampler, output, failure = self.sampler(), None, None
        idle = sampler.call is not None and sampler.call.request.empty
        cause: Exception | None = None
        if (reason := sampler.why_equal) is not None:
            counts = gather_lists([0 if idle else len(prompts)])
            if len(set(counts)) > 1:
                raise RolloutError(
                    f"rollout_func would get {min(counts)} to {max(counts)} prompts on this number of processes, and "
                    f"{reason}; use a number of prompts (also for evaluation) that they share evenly."
                )
        if not idle:
            try:
                with sampler.outside():
                    output = self.__wrapped__(prompts, trainer)
                failure = _what_is_wrong(output, len(prompts))
            except Exception as error:  # told to the other processes first
                failure, cause = f"raised {type(error).__name__}: {error}", error
        found = None if output is None or failure else (output["logprobs"] is not None, "env_mask" in output)
        everyone = gather_lists([(idle, failure, found)])
        failures = [(rank, reason) for rank, (_, reason, _) in enumerate(everyone) if reason is not None]
        if failures:
            rank, reason = failures[0]
            where = f" on process {rank}" if len(everyone) > 1 else ""
            raise RolloutError(f"rollout_func {reason}{where}. {_REMEDY}") from cause
        kinds = [kind for _, _, kind in everyone if kind is not None]
        if len({logprobs for logprobs, _ in kinds}) > 1:
            raise RolloutError(f"rollout_func returned logprobs on some processes and None on others. {_REMEDY}")
        with_logprobs, with_mask = kinds[0][0], any(mask for _, mask in kinds)
        if self.needs_logprobs is not None and not with_logprobs:
            raise RolloutError(f"rollout_func returned logprobs=None, and {self.needs_logprobs}.")
        if output is None:  # rows that no result contains
            end = trainer._tokenizer.eos_token_id
            rows = [[end] for _ in prompts]
            output = {"prompt_ids": rows, "completion_ids": rows, "logprobs": [[0.0] for _ in prompts]}
            output["logprobs"] = output["logprobs"] if with_logprobs else None
        if with_mask and "env_mask" not in output:
            output = {**output, "env_mask": [[1] * len(ids) for ids in output["completion_ids"]]}
        return output


_REMEDY = (
    "It takes (prompts, trainer) and returns a dictionary with prompt_ids and completion_ids, one list of token ids "
    "for each prompt, and logprobs, one list of numbers for each prompt or None; further lists (env_mask: 1 for each "
    "token of the model, 0 for others) have one entry for each prompt too."
)


def _what_is_wrong(output: Any, rows: int) -> str | None:
    """What TRL could not take of an output, as the rest of a sentence; None if nothing."""
    if not isinstance(output, dict):
        return f"returned a {type(output).__name__} in the place of a dictionary"
    missing = [name for name in _REQUIRED if name not in output]
    if missing:
        return f"returned no {', '.join(missing)}"
    for name, values in output.items():
        if name == "logprobs" and values is None:
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
    for row, (own, ids) in enumerate(zip(values or (), completion_ids)):
        count = len(own) if hasattr(own, "__len__") else own
        if count != len(ids):
            return f"returned {count} {name} for the {len(ids)} tokens of completion {row}"
    return None
