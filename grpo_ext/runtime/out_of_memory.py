"""Running out of memory does not end a run: work that does not fit runs again in halves.

Differs from TRL and Accelerate's `auto_find_batch_size`, which start the whole run again with another batch: here the
smaller size is layout, so the update stays the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from ..batching.sizes import ceil_div
from ..errors import MemoryShortageError, counted
from .messages import logger

T = TypeVar("T")


class StepOutOfMemory(Exception):
    """A process ran out of memory in an optimizer step; raised on all of them, after the gradients were thrown away."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that a device (or the host) has no memory left."""
    # Accelerate also takes what cuDNN does not support for it
    return isinstance(error, torch.OutOfMemoryError) or (should_reduce_batch_size(error) and "CUDNN" not in str(error))


def shortage_of_one(reason: str, sequence_parallel_size: int) -> MemoryShortageError:
    """The error of a process whose forwards others take part in, so that it cannot run them again by itself."""
    reason = reason.partition("\n")[0]
    return MemoryShortageError(
        f"a step ran out of memory on this process ({reason}), and cannot run again in smaller micro-batches, because "
        "other processes take part in its forwards. What helps: gradient_checkpointing=True, a smaller "
        "per_device_train_batch_size or micro_batch_tokens, and where one completion does not fit, a larger "
        f"sequence_parallel_size (now {sequence_parallel_size}; not with DeepSpeed)."
    )


def available_bytes(device: torch.device) -> int | None:
    """torch's unused cache included; None where it is unknown."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def device_kind(device: torch.device) -> str:
    """Name and memory of a device: what fits on it fits on others of its kind."""
    name, total = device.type, psutil.virtual_memory().total
    if device.type == "cuda":
        name, total = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    return f"{name} with {total / 2**30:.0f} GiB"


@dataclass
class Halving:
    """Runs work on rows in pieces that fit into memory, and remembers their size."""

    what: str  # the work, for messages
    remedy: str  # how to make one completion smaller, for messages
    enabled: bool = True  # whether a piece may be cut; not in a canonical layout or where a forward is a collective
    limit: int | None = None  # completions
    _foreseen: int | None = None  # the size that was reported last

    def state_dict(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.limit = state["limit"]

    def run(self, rows: Sequence[int], work: Callable[[Sequence[int]], T], expected: int | None = None) -> list[T]:
        """The results of `work` on consecutive pieces of `rows`; `expected`: how many are expected to fit."""
        size = len(rows) if self.limit is None else min(self.limit, len(rows))
        if self.enabled and expected is not None and expected < size:
            size = ceil_div(size, ceil_div(size, max(1, expected)))
            if size != self._foreseen:
                self._foreseen = size
                logger.warning(
                    f"{self.what} of {len(rows)} completions at their longest is expected to exceed the free memory, "
                    f"which holds about {expected}; it runs with {size} at a time."
                )
        results: list[T] = []
        start = 0
        while start < len(rows):
            piece = rows[start : start + size]
            try:
                results.append(work(piece))
                start += size
                continue
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            clear_device_cache(garbage_collection=True)
            if not self.enabled or len(piece) == 1:
                raise MemoryShortageError(
                    f"{self.what} ran out of memory with {counted(len(piece), 'completion')} ({reason}); {self.remedy}."
                )
            size = self.limit = ceil_div(len(piece), 2)
            logger.warning(
                f"{self.what} ran out of memory with {len(piece)} completions; {size} at a time from now on."
            )
        return results


_FEWEST_TOKENS = 2  # of a micro-batch that is cut by its tokens


@dataclass
class MicroBatchLimits:
    """The size of a micro-batch: as set, or smaller where memory ran out."""

    rows: int  # completions
    tokens: int | None = None
    failures: int = 0  # how often memory ran out

    def shrink(self, largest_rows: int, largest_tokens: int, what: str = "a step", cuttable: bool = False) -> str:
        """Halve after `what` failed with micro-batches of these sizes on any process; returns the new limit as text.

        `cuttable`: a completion has several rows, which may run one after the other.
        """
        self.failures += 1
        if largest_rows <= 1 and not (cuttable and self.tokens != _FEWEST_TOKENS):
            raise MemoryShortageError(
                f"{what} ran out of memory with one completion of {largest_tokens} tokens (prompt included), the "
                "smallest micro-batch there is. What helps: gradient_checkpointing=True, a smaller "
                "max_completion_length, bf16=True, LoRA, sharding (FSDP, ZeRO-3), or on several devices "
                "sequence_parallel_size."
            )
        if largest_rows <= 1 and self.tokens is None:
            self.tokens = largest_tokens
        if self.tokens is not None:
            self.tokens = max(min(self.tokens, largest_tokens) // 2, _FEWEST_TOKENS)
            self.rows = min(self.rows, largest_rows)
            return f"micro_batch_tokens={self.tokens}"
        self.rows = ceil_div(min(self.rows, largest_rows), 2)
        return f"{counted(self.rows, 'completion')} at a time"

    def what_fits(self) -> str:
        tokens = "" if self.tokens is None else f", micro_batch_tokens={self.tokens}"
        failures = counted(self.failures, "time")
        return f"Memory ran out {failures}. What fits here: per_device_train_batch_size={self.rows}{tokens}"

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A checkpoint's sizes, where they are smaller because memory ran out with larger ones."""
        if state["failures"]:
            self.rows, self.failures = min(self.rows, state["rows"]), state["failures"]
            sizes = (size for size in (self.tokens, state["tokens"]) if size is not None)
            self.tokens = min(sizes, default=None)
