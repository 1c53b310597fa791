"""Collectives that take a different number of rows from every process, including none.

Accelerate's `gather` wants equal shapes on all processes; their parts of a rollout batch are unequal by design.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, broadcast, broadcast_object_list, gather, gather_object, recursively_apply
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from ..errors import CheckpointError, GrpoExtError, ProcessError, RolloutError, quiet

_BUCKET_BYTES = 64 * 2**20  # of one collective: large enough to be fast, small beside the gradient
_PULSE = 0.5  # seconds in which processes ask each other whether they are done
_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, collectives of this thread answer for this process alone.

    For the thread that samples ahead: the order of collectives of two threads could differ between processes.
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def wait_for_all(accelerator: Accelerator) -> None:
    """Wait until all processes arrive here."""
    _refuse_alone()
    accelerator.wait_for_everyone()


def _refuse_alone() -> None:
    if _alone.get():
        raise RuntimeError("a collective beside training: processes could run them in different orders, and hang.")


def _processes() -> int:
    """Processes that take part in a collective of this thread."""
    return 1 if _alone.get() else PartialState().num_processes


def equal_gather(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenate tensors of one shape along the first dimension, in process order, on every process."""
    return tensor if _alone.get() else gather(tensor)


def gather_lists(items: list[Any]) -> list[Any]:
    """The lists of all processes as one, in process order; for objects that can be pickled."""
    return items if _alone.get() else gather_object(items)


def ragged_gather(tensor: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """Concatenate tensors of any length along the first dimension, in process order, on every process.

    Args:
        tensor: any shape; a scalar counts as one row, as in Accelerate's `gather`.
        rows: rows of this process that count (default: all).
    """
    flat = tensor[None] if tensor.dim() == 0 else tensor
    flat = flat[:rows].contiguous()
    if _processes() == 1:
        return flat
    lengths = equal_gather(torch.tensor([flat.size(0)], device=flat.device))
    longest = int(lengths.max())
    if longest == 0:
        return flat
    padded = flat.new_zeros((longest, *flat.shape[1:]))
    padded[: flat.size(0)] = flat
    gathered = equal_gather(padded).view(len(lengths), longest, *flat.shape[1:])
    return torch.cat([part[:n] for part, n in zip(gathered, lengths.tolist())])


@contextmanager
def uneven_gathers(accelerator: Accelerator, empty: bool = False, refused_in: str | None = None) -> Iterator[None]:
    """Inside, `accelerator.gather` takes a different number of rows from every process, for a user's overrides.

    TRL gives every process the same number of rows, so code that is written for it gathers equal shapes.

    Args:
        empty: this process takes part but adds none of its rows; a sum or a count of it is zero.
        refused_in: the hook that runs, where processes call it different numbers of times: others would not join.

    Raises:
        RolloutError: the hook `refused_in` gathers, and there are several processes.
    """

    def gather_one(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return equal_gather(torch.zeros_like(tensor) if empty else tensor)
        return ragged_gather(tensor, 0 if empty else None)

    def gather_any(tensors: Any) -> Any:  # nested as Accelerate takes them
        if refused_in is not None and accelerator.num_processes > 1:
            raise RolloutError(
                f"{refused_in} gathers, and is called once for each rollout chunk, of which processes have different "
                "numbers; gather in _generate or _generate_and_score_completions instead."
            )
        return recursively_apply(gather_one, tensors, error_on_other_type=True)

    with mock.patch.object(accelerator, "gather", gather_any):
        yield


def stack_over_processes(values: torch.Tensor) -> torch.Tensor:
    """Stack tensors of one shape over all processes: (processes, ...)."""
    return equal_gather(values[None])


def copy_from_main_process(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Give the parameters and buffers of a model their values on the main process; returns the model."""
    _refuse_alone()
    if PartialState().num_processes > 1:
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.data.copy_(broadcast(tensor.data.to(device).contiguous()))
    return model


def gather_in_group(value: Any, group: Any, size: int) -> list[Any]:
    """One object of each of the `size` processes of a torch process group."""
    _refuse_alone()
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def sum_in_place(tensors: Sequence[torch.Tensor]) -> None:
    """Sum tensors over all processes in place, in buckets of one type."""
    _refuse_alone()
    for bucket in _take_tensors(tensors, _BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat)
        for tensor, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket)):
            tensor.copy_(summed)


def sum_over_processes(values: torch.Tensor) -> torch.Tensor:
    """Element-wise sum over all processes; equal to `values` on one process."""
    return stack_over_processes(values).sum(0)


def max_over_processes(value: int, device: torch.device) -> int:
    """Largest of one integer per process."""
    return value if _processes() == 1 else int(equal_gather(torch.tensor([value], device=device)).max())


def any_process(value: bool, device: torch.device) -> bool:
    """Whether a value is true on any process."""
    return bool(max_over_processes(int(value), device))


def first_of_all_processes(value: Any) -> Any:
    """The first value that is not None, in process order; None if all are."""
    return next((item for item in gather_lists([value]) if item is not None), None)


@contextmanager
def failing_together(explain: Callable[[str], str]) -> Iterator[None]:
    """An error inside on one process is raised on all, so that none waits in a later collective.

    Args:
        explain: from the first failure's message to that of the error.

    Raises:
        CheckpointError: on every process.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # raised below, once the other processes know of it
        failure = error
    first = first_of_all_processes(None if failure is None else f"{type(failure).__name__}: {failure}")
    if first is None:
        return
    if isinstance(failure, CheckpointError):
        raise failure
    raise CheckpointError(explain(first)) from failure


def without_long_waits(work: Callable[[], Any], device: torch.device) -> Any:
    """The result of `work`, which holds no collectives, once all processes are done with theirs.

    A process that is done asks the others again and again: a single collective would end the run after its timeout.
    """
    _refuse_alone()
    if _processes() == 1:
        return work()
    result = ThreadPoolExecutor(1).submit(work)
    while True:
        wait([result], _PULSE)
        if not any_process(not result.done(), device):
            return result.result()


def from_main_process(accelerator: Accelerator | PartialState, make: Callable[[], Any]) -> Any:
    """The result of `make` on the main process, on every process; all raise its error, and the main one prints it."""
    value, failure = None, None
    try:
        value = without_long_waits(make if accelerator.is_main_process else lambda: None, accelerator.device)
    except GrpoExtError as error:
        failure = error
    except Exception as error:  # its class may not be picklable
        failure = ProcessError(f"process 0 failed: {type(error).__name__}: {error}")
        failure.__cause__ = error  # for the traceback; it stays on this process
    value, failure = broadcast_object_list([(value, failure)])[0]
    if failure is None:
        return value
    if not accelerator.is_main_process:
        time.sleep(1.0)  # the launcher ends all processes once one has ended; let the main one print first
        failure = quiet(failure)
    raise failure.with_traceback(None)


@functools.cache
def leave_in_order(seconds: float = 0.2) -> None:
    """Let gloo's threads finish with the last collective before the interpreter is torn down.

    The threads release tensors after the collective has returned, which takes the GIL. CPython ends a thread that asks
    for the GIL during shutdown, here inside a destructor, and the process aborts ("terminate called without an active
    exception"; torch 2.13, CPython 3.11). `destroy_process_group` waits for nothing while DDP holds the group.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        atexit.register(time.sleep, seconds)


def shards_parameters(accelerator: Accelerator) -> bool:
    """Whether a forward is itself a collective (FSDP, DeepSpeed), so that all processes need the same number."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
