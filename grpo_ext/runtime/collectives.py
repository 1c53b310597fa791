"""Collectives that take a different number of rows from every process, including none.

Accelerate's `gather` wants equal shapes on all processes; their parts of a rollout batch are unequal by design. An
exchange begins with a header, in which a process says where it is, or that it failed; so none waits for one that did.
"""

import atexit
import functools
import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Self

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, broadcast, broadcast_object_list, gather, gather_object, recursively_apply
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, GrpoExtError, MemoryShortageError, PrecisionError, ProcessError, RolloutError, quiet
from .attributes import temporarily_set
from .out_of_memory import StepOutOfMemory, is_out_of_memory
from .transfer import pack, unpack

_MAGIC = 0x67727065  # a header begins with it
_REMEDY = "Collectives in your code have to run equally often on every process; see docs/overrides.md."
# errors that are raised as what they are on the other processes too
_KEPT = (RolloutError, PrecisionError, MemoryShortageError, StepOutOfMemory)
_BUCKET_BYTES = 64 * 2**20  # of one collective: large enough to be fast, small beside the gradient
_PULSE = 0.5  # seconds in which processes ask each other whether they are done
_local: ContextVar[bool] = ContextVar("local", default=False)


@contextmanager
def local_collectives() -> Iterator[None]:
    """The collectives of the thread that samples ahead stay local: processes could run them in another order."""
    token = _local.set(True)
    try:
        yield
    finally:
        _local.reset(token)


def wait_for_all() -> None:
    _refuse_local()
    _meet("a wait for all processes")


def _refuse_local() -> None:
    if _local.get():
        raise ConfigError(
            "a collective on the thread that samples ahead: processes could run it and those of training in different "
            "orders, and hang. Use rollout_lag=0, or no collective in reward functions and tools."
        )


def _processes() -> int:
    return 1 if _local.get() else PartialState().num_processes


@functools.cache
def leave_in_order() -> None:
    """Let gloo's threads finish with the last collective before the interpreter is torn down.

    They release tensors after it has returned, which takes the GIL; CPython ends a thread that asks for the GIL during
    shutdown, and the process aborts (torch 2.13, CPython 3.11). `destroy_process_group` does not wait for them.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        atexit.register(time.sleep, 0.2)


# ---- Meeting --------------------------------------------------------------------------------------------------------


class _Counter:
    ours = 0  # collectives of this process that are not a user's


def _collectives() -> int:
    """Collectives that this process has run; 0 for a backend that does not count."""
    with suppress(RuntimeError):
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    return 0


@contextmanager
def not_of_users() -> Iterator[None]:
    """Inside, collectives are not a user's; see `uneven_collectives`."""
    if _local.get():
        yield
        return
    before = _Counter.ours - _collectives()
    yield
    _Counter.ours = before + _collectives()


@not_of_users()
def _meet(place: str, value: int = 0, failure: Exception | None = None) -> list[int]:
    """One value of each process, once all are here; a ProcessError where one is elsewhere, or announces a failure."""
    if _processes() == 1:
        if failure is not None:
            raise failure
        return [value]
    here = 0 if failure is not None else zlib.crc32(place.encode())
    headers = gather(torch.tensor([[_MAGIC, here, value]], device=PartialState().device)).tolist()
    if here and all(header[:2] == [_MAGIC, here] for header in headers):
        return [header[2] for header in headers]
    if any(header[0] != _MAGIC for header in headers):
        raise _known(ProcessError(f"at {place}, a collective of torch.distributed or accelerate.utils met. {_REMEDY}"))
    sent = None if failure is None else (type(failure).__name__, str(failure))  # its class may not be picklable
    places, reports = zip(*gather_object([(place, sent)]), strict=True)
    failures = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
    if not failures:
        where = "; ".join(f"process {rank} is at {name}" for rank, name in enumerate(places))
        raise _known(ProcessError(f"processes run different collectives: {where}. {_REMEDY}"))
    # a step that runs out of memory runs again; any other error ends the run
    rank, kind, message = min(failures, key=lambda report: report[1] == StepOutOfMemory.__name__)
    if failure is not None and (kind == StepOutOfMemory.__name__ or not isinstance(failure, StepOutOfMemory)):
        raise _known(failure)
    for kept in _KEPT:
        if kept.__name__ == kind:
            raise _known(kept(f"on process {rank}, {message}"))
    raise _known(ProcessError(f"process {rank} failed: {kind}: {message}"))


def _known(error: Exception) -> Exception:
    error.__dict__["on_all_processes"] = True
    return error


def on_all_processes(error: BaseException) -> bool:
    """Whether the other processes know of this error, and raise it too."""
    return "on_all_processes" in vars(error)


@contextmanager
def raise_on_all(place: str, sharded: bool = False, again: bool = False) -> Iterator[None]:
    """An error inside on one process is raised on all, at the end or in the exchange they are in.

    Not where a forward is a collective (`sharded`): who waits in one cannot learn of an error. With `again`, memory
    that runs out is a `StepOutOfMemory`.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if sharded or on_all_processes(error):
            raise
        failure = error
        if again and is_out_of_memory(error):  # the error itself would keep the tensors of its frames
            failure = StepOutOfMemory(str(error).partition("\n")[0])
    if not sharded:
        _meet(place, failure=failure)


# ---- Exchanges ------------------------------------------------------------------------------------------------------


@not_of_users()
def stack_over_processes(values: torch.Tensor) -> torch.Tensor:
    """Stack tensors of one shape over all processes: (processes, ...)."""
    return values[None] if _local.get() else gather(values[None])


@not_of_users()
def gather_lists(items: list[Any]) -> list[Any]:
    """Gather lists of objects that can be pickled, in process order."""
    _meet("an exchange of lists")
    return items if _local.get() else gather_object(items)


@not_of_users()
def gather_on_main(items: list[Any]) -> list[Any]:
    """Like `gather_lists`, on the main process; the others get nothing."""
    _meet("an exchange with the main process")
    if _processes() == 1:
        return items
    parts: list[Any] | None = [None] * _processes() if PartialState().is_main_process else None
    dist.gather_object(items, parts)
    return [item for part in parts or () for item in part]


def gather_nested(values: Any) -> list[Any]:
    """Gather nested values of all processes; tensors of CPU memory are sent as bytes, without being pickled."""
    if _processes() == 1:
        return [values]
    replaced, buffer = pack(values)
    everyone = gather_lists([replaced])
    buffers = _ragged_parts(buffer.to(PartialState().device))
    return [unpack(own, part.cpu()) for own, part in zip(everyone, buffers, strict=True)]


def ragged_gather(tensor: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """Concatenate the first `rows` rows (default: all) of every process, in process order; a scalar is one row."""
    flat = tensor[None] if tensor.dim() == 0 else tensor
    flat = flat[:rows].contiguous()
    return flat if _processes() == 1 else torch.cat(_ragged_parts(flat))


def _ragged_parts(flat: torch.Tensor) -> list[torch.Tensor]:
    lengths = _meet(f"a gather of {flat.dtype} with {list(flat.shape[1:])} in each row", flat.size(0))
    longest = max(lengths)
    if longest == 0:
        return [flat] * len(lengths)
    padded = flat.new_zeros((longest, *flat.shape[1:]))
    padded[: flat.size(0)] = flat
    return [part[:n] for part, n in zip(stack_over_processes(padded), lengths, strict=True)]


class UsersAccelerator(Accelerator):
    """A trainer's accelerator, for users' code: see `uneven_collectives`. Refused on the thread that samples ahead."""

    empty: Callable[[], bool] | None = None  # where rows are uneven, whether this process adds none
    refused_in: str | None = None

    @classmethod
    def of(cls, accelerator: Accelerator) -> Self:
        users = cls.__new__(cls)
        users.__dict__ = accelerator.__dict__
        return users

    def _meet(self, name: str) -> Callable[[], bool] | None:
        """Meet the other processes where rows are uneven, and return `empty`; None elsewhere."""
        if self.num_processes > 1:
            _refuse_local()
        if self.refused_in is not None:
            raise RolloutError(
                f"{self.refused_in} gathers, and is called once for each rollout chunk, of which processes have "
                "different numbers; gather in _generate_and_score_completions instead."
            )
        if self.empty is not None:
            _meet(f"accelerator.{name}")
        return self.empty

    def gather(self, tensor: Any) -> Any:
        if (empty := self._meet("gather")) is None:
            return super().gather(tensor)
        rows = 0 if empty() else None
        return recursively_apply(lambda part: ragged_gather(part.detach(), rows), tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if (empty := self._meet("reduce")) is None:
            return super().reduce(tensor, reduction, scale)

        def reduced(tensor: torch.Tensor) -> torch.Tensor:
            parts = ragged_gather(tensor.detach()[None], 0 if empty() else None)
            total = parts.amax(0) if reduction == "max" and len(parts) else parts.sum(0, dtype=tensor.dtype)
            if tensor.requires_grad:  # the gradient passes through, as in Accelerate's method
                total = total + (tensor - tensor.detach())
            return total / max(len(parts), 1) if reduction == "mean" else total

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if (empty := self._meet("gather_for_metrics")) is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        with suppress(TypeError):  # not tensors
            if not use_gather_object:
                return self.gather(input_data)
        return gather_lists([] if empty() else input_data)

    def pad_across_processes(self, *args: Any, **kwargs: Any) -> Any:
        self._meet("pad_across_processes")
        with not_of_users():
            return super().pad_across_processes(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        self._meet("wait_for_everyone")
        with not_of_users():
            super().wait_for_everyone()


@contextmanager
def uneven_collectives(
    accelerator: Accelerator,  # a trainer's, which is a `UsersAccelerator`
    empty: Callable[[], bool] = lambda: False,  # whether this process takes part now but adds nothing of its own
    refused_in: str | None = None,  # the running hook, if processes call it unequally often; it may not exchange data
    others_refused: str | None = None,  # why code inside may not run others (a ConfigError), as a clause; None: it may
) -> Iterator[None]:
    """Inside, collectives of `accelerator` accept different numbers of rows from processes, for a user's overrides."""
    if accelerator.num_processes == 1:
        yield
        return
    before = _collectives() - _Counter.ours
    with temporarily_set(accelerator, empty=empty, refused_in=refused_in):
        yield
    if others_refused and _collectives() - _Counter.ours != before:
        raise ConfigError(
            f"your code ran a collective of accelerate.utils or torch.distributed, and {others_refused}. Use "
            "accelerator.gather, reduce or gather_for_metrics, which leave these rows out; see docs/overrides.md."
        )


def copy_from_main_process(model: torch.nn.Module) -> None:
    _refuse_local()
    if (state := PartialState()).num_processes > 1:
        _meet("a copy of the main process's weights")
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.data.copy_(broadcast(tensor.data.to(state.device).contiguous()))


def gather_in_group(value: Any, group: Any, size: int) -> list[Any]:
    _refuse_local()
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


@not_of_users()
def sum_in_place(tensors: Sequence[torch.Tensor]) -> None:
    _refuse_local()
    _meet("a sum over the processes")
    for bucket in _take_tensors(tensors, _BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat)
        for tensor, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            tensor.copy_(summed)


def max_over_processes(value: int) -> int:
    return max(_meet("an exchange of numbers", value))


def any_process(value: bool) -> bool:
    return bool(max_over_processes(int(value)))


def without_long_waits(work: Callable[[], Any]) -> Any:
    """The result of `work`, which holds no collectives, once all are done; a single wait would meet the timeout."""
    _refuse_local()
    if _processes() == 1:
        return work()
    result = ThreadPoolExecutor(1).submit(work)
    while True:
        wait([result], _PULSE)
        if not any_process(not result.done()):
            return result.result()


def from_main_process(accelerator: Accelerator | PartialState, make: Callable[[], Any]) -> Any:
    """The result of `make` on the main process, on every process; all raise its error, and the main one prints it."""
    value, failure = None, None
    try:
        value = without_long_waits(make if accelerator.is_main_process else lambda: None)
    except GrpoExtError as error:
        failure = error
    except Exception as error:  # its class may not be picklable
        failure = ProcessError(f"process 0 failed: {type(error).__name__}: {error}")
        failure.__cause__ = error  # for the traceback; it stays on this process
    value, failure = broadcast_object_list([(value, failure)])[0]
    if failure is not None and not accelerator.is_main_process:
        time.sleep(1.0)  # the launcher ends all processes once one has ended; let the main one print first
        failure = quiet(failure)
    if failure is not None:
        raise failure.with_traceback(None)
    return value


def full_tensor(tensor: Any) -> torch.Tensor:
    """A tensor; a collective where FSDP holds a part of it on each process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(parameter: Any) -> torch.Tensor:
    """What this process holds of a parameter, which FSDP or ZeRO-3 may have cut."""
    return parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)


def shards_parameters(accelerator: Accelerator) -> bool:
    """Whether a forward is itself a collective (FSDP, DeepSpeed), so that all processes need the same number."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
