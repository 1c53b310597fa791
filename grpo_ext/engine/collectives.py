"""Collectives that take a different number of rows from every process, including none.

Accelerate's `gather` wants equal shapes on all processes; shares of a rollout batch are unequal by design. Used by the
trainer around TRL's scoring code and by engine.rollouts.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from accelerate.utils import gather as equal_gather

from ..compat import trl_module
from ..errors import CheckpointError


def ragged_gather(tensor: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """Concatenate tensors of any length along the first dimension, in process order, on every process.

    Args:
        tensor: any shape; a scalar counts as one row, as in Accelerate's `gather`.
        rows: rows of this process that count (default: all).
    """
    flat = tensor[None] if tensor.dim() == 0 else tensor
    flat = flat[:rows].contiguous()
    lengths = equal_gather(torch.tensor([flat.size(0)], device=flat.device))
    longest = int(lengths.max())
    if len(lengths) == 1 or longest == 0:
        return flat
    padded = flat.new_zeros((longest, *flat.shape[1:]))
    padded[: flat.size(0)] = flat
    gathered = equal_gather(padded).view(len(lengths), longest, *flat.shape[1:])
    return torch.cat([part[:n] for part, n in zip(gathered, lengths.tolist())])


@contextmanager
def ragged_scoring(accelerator: Accelerator, ghost: bool) -> Iterator[None]:
    """Let TRL's scoring code gather shares of unequal size; a `ghost` process takes part but adds no row.

    TRL gathers through `accelerator.gather` and through the functions it imported by name; all three are replaced for
    the duration of the call by versions that agree with the originals where every share has the same size.
    """
    rows = 0 if ghost else None

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:  # sums and counts: a ghost's are zero
            return equal_gather(torch.zeros_like(tensor) if ghost else tensor)
        return ragged_gather(tensor, rows)

    def objects(items: Any) -> Any:
        return gather_object([] if ghost else items)

    with (
        mock.patch.object(accelerator, "gather", gather),
        mock.patch.object(trl_module, "gather", gather),
        mock.patch.object(trl_module, "gather_object", objects),
    ):
        yield


def sum_over_processes(values: torch.Tensor) -> torch.Tensor:
    """Element-wise sum over all processes; equal to `values` on one process."""
    return equal_gather(values[None]).sum(0)


def max_over_processes(value: int, device: torch.device) -> int:
    """Largest of one integer per process."""
    return int(equal_gather(torch.tensor([value], device=device)).max())


def any_process(value: bool, device: torch.device) -> bool:
    """Whether a value is true on any process."""
    return bool(max_over_processes(int(value), device))


def first_of_all_processes(value: Any) -> Any:
    """The first value that is not None, in process order; None if all are."""
    return next((found for found in gather_object([value]) if found is not None), None)


@contextmanager
def failing_together(explain: Callable[[str], str]) -> Iterator[None]:
    """What fails inside on one process fails on all of them, so that none waits for it in a later collective.

    Args:
        explain: from the first failure's message to that of the error.

    Raises:
        CheckpointError: on every process.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # told to the others first
        failure = error
    first = first_of_all_processes(None if failure is None else f"{type(failure).__name__}: {failure}")
    if first is None:
        return
    if isinstance(failure, CheckpointError):
        raise failure
    raise CheckpointError(explain(first)) from failure


def from_main_process(accelerator: Accelerator, make: Callable[[], Any]) -> Any:
    """What the main process makes, on every process."""
    made = [make() if accelerator.is_main_process else None]
    return broadcast_object_list(made)[0]


@functools.cache
def leave_in_order(seconds: float = 0.2) -> None:
    """Let gloo's threads finish with the last collective before the interpreter is torn down.

    They let go of its tensors after it has returned, and want the GIL for that. CPython ends a thread that wants the
    GIL of an interpreter that is being torn down, here inside a destructor, and the process aborts ("terminate called
    without an active exception"; torch 2.13, CPython 3.11). `destroy_process_group` waits for nothing while DDP holds
    the group.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        atexit.register(time.sleep, seconds)
