"""Where processes that sample together need the same number of prompts: the one rule, and what refuses other numbers.

Used by checks before training, and where completions are sampled.
"""

from typing import Any

from ..errors import RolloutError
from ..runtime.collectives import gather_lists

UNEQUAL_SHARES = "vLLM cuts what several processes sampled together as if each had the same number of rows"


def why_equal(args: Any, sharded: bool, rollout_func: bool = False) -> str | None:
    """Why processes need the same number of prompts to sample together, as a clause; None if they do not.

    `args` is a `GRPOConfig`. With `sharded` processes share the weights (FSDP, DeepSpeed). A `rollout_func` may call
    TRL's `VLLMGeneration.generate`.
    """
    if sharded:
        return "a forward of a sharded model is a collective"
    shares_engine = rollout_func if args.vllm_mode == "server" else args.vllm_tensor_parallel_size > 1
    return UNEQUAL_SHARES if args.use_vllm and shares_engine else None


def refuse_unequal_shares(caller: str, rows: int, reason: str) -> None:
    counts = gather_lists([rows])
    if len(set(counts)) > 1:
        raise RolloutError(
            f"{caller} would sample {min(counts)} to {max(counts)} completions on this number of processes, and "
            f"{reason}; use a number of prompts (also for evaluation) that they share evenly."
        )
