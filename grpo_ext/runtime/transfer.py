"""Moves tensors together: in one buffer, and so in one copy to a device or one exchange between processes."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device

_ALIGNMENT = 16  # bytes; of the largest element


@dataclass(frozen=True)
class Packed:
    """What stands for a tensor whose bytes are in a buffer."""

    dtype: torch.dtype
    shape: torch.Size
    start: int  # of its bytes


def pack(values: Any, pin_memory: bool = False) -> tuple[Any, torch.Tensor]:
    """Nested values with a `Packed` for each tensor of CPU memory, and the buffer with their bytes."""
    tensors: list[tuple[torch.Tensor, int]] = []
    total = 0

    def packed(tensor: torch.Tensor) -> torch.Tensor | Packed:
        nonlocal total
        if tensor.device.type != "cpu":
            return tensor
        tensors.append((tensor, total))
        total += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
        return Packed(tensor.dtype, tensor.shape, tensors[-1][1])

    replaced = recursively_apply(packed, values)
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=pin_memory)
    for tensor, start in tensors:
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return replaced, buffer


def unpack(replaced: Any, buffer: torch.Tensor) -> Any:
    """The values of `pack`, with tensors that may be written to."""

    def tensor(part: Packed) -> torch.Tensor:
        size = part.shape.numel() * part.dtype.itemsize
        return buffer[part.start : part.start + size].view(part.dtype).view(part.shape).clone()

    return recursively_apply(tensor, replaced, test_type=lambda value: isinstance(value, Packed))


def to_device(values: Any, device: torch.device | str) -> Any:
    """Like Accelerate's `send_to_device`, with one copy for all tensors of CPU memory; each may be written to.

    The host does not wait for it.
    """
    if torch.device(device).type != "cuda":
        return send_to_device(values, device)
    replaced, buffer = pack(values, pin_memory=True)
    moved = unpack(replaced, buffer.to(device, non_blocking=True))
    return send_to_device(moved, device, non_blocking=True)
