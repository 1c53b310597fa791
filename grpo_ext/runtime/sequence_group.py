"""Processes that share the tokens of every micro-batch, and what they exchange inside a forward.

Differs from runtime.collectives: these calls have a backward pass, equal shapes and no header. The members of a group
run the same forwards in the same order; one that fails leaves the others waiting until the run ends.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator


class SequenceGroup:
    """This process's group of `size` neighbours; not a dataclass: FSDP copies dataclass arguments."""

    def __init__(self, accelerator: Accelerator, size: int, timeout: timedelta) -> None:
        self.size = size
        self.number, self.member = divmod(accelerator.process_index, size)  # of the group; of this process in it
        # every process makes all groups, in the same order
        groups = [range(first, first + size) for first in range(0, accelerator.num_processes, size)]
        self._handle = [dist.new_group([*ranks], timeout=timeout) for ranks in groups][self.number]

    @classmethod
    def of(cls, accelerator: Accelerator, size: int, timeout_s: float) -> "SequenceGroup | None":
        """None where every process has its own micro-batches."""
        return cls(accelerator, size, timedelta(seconds=timeout_s)) if size > 1 else None

    def swap(self, parts: torch.Tensor) -> torch.Tensor:
        """Send part i (of `size`, along the first dimension) to member i; part i of the result is from member i."""
        return _Swap.apply(parts, self._handle)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Stack tensors of one shape over the members, (size, ...).

        Every member computes the same from the result, so the gradient of each is its own part of it, once.
        """
        return _Gather.apply(values, self._handle, self.size, self.member)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the members; the gradient passes through, as in `gather`."""
        return self.gather(values).sum(0)

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._handle)
        return values


def _swap(parts: torch.Tensor, handle: Any) -> torch.Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=handle)
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


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, handle: Any, size: int, member: int) -> torch.Tensor:
        ctx.member = member
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, values.contiguous(), group=handle)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grad[ctx.member], None, None, None
