"""Processes that share the tokens of every micro-batch, and what they exchange inside a forward.

Differs from runtime.collectives: these calls have a backward pass, equal shapes and no header. The members of a group
run the same forwards in the same order; one that fails leaves the others waiting until the run ends.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from ..errors import ProcessError


class SequenceGroup:
    """This process's group of `size` neighbours; not a dataclass: FSDP copies dataclass arguments."""

    def __init__(self, accelerator: Accelerator, size: int, timeout_s: float) -> None:
        self.size = size
        number, self.member = divmod(accelerator.process_index, size)
        # every process makes all groups, in the same order
        groups = [range(first, first + size) for first in range(0, accelerator.num_processes, size)]
        self.handle = [dist.new_group([*ranks], timeout=timedelta(seconds=timeout_s)) for ranks in groups][number]

    def swap(self, parts: torch.Tensor) -> torch.Tensor:
        """Send part i (of `size`, along the first dimension) to member i; part i of the result is from member i."""
        return _Swap.apply(parts, self.handle)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the members. Each computes the same from it, so the gradient passes through, once."""
        return _Total.apply(values, self.handle)


def _run(collective: Callable[..., Any], *tensors: torch.Tensor, handle: Any) -> None:
    try:
        collective(*tensors, group=handle)
    except RuntimeError as error:  # gloo's, once a process has ended
        reason = str(error).partition("\n")[0]
        raise ProcessError(
            f"another process that shares this one's micro-batches has failed, and its output says why ({reason})"
        ) from None


def _swap(parts: torch.Tensor, handle: Any) -> torch.Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    _run(dist.all_to_all_single, received, parts.contiguous(), handle=handle)
    return received


class _Swap(torch.autograd.Function):
    """Equal parts, so the exchange is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, handle: Any) -> torch.Tensor:
        ctx.handle = handle
        return _swap(parts, handle)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _swap(grad, ctx.handle), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, handle: Any) -> torch.Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        _run(dist.all_reduce, total, handle=handle)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
