"""Moves tensors together: in one buffer, and so in one copy to a device or one exchange between processes."""

import math
from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device

_ALIGNMENT = 16  # bytes; of the largest element


def _size(tensor: torch.Tensor) -> int:
    return math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT


def pack(values: Any, pin_memory: bool = False) -> tuple[Any, torch.Tensor]:
    """Nested values with tensors of CPU memory moved to "meta", and a buffer with their bytes, in this order."""
    tensors: list[torch.Tensor] = []

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        tensors.append(tensor)
        return tensor.detach().to("meta")

    replaced, sizes = recursively_apply(moved, values), [_size(tensor) for tensor in tensors]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin_memory)
    for part, tensor in zip(buffer.split(sizes), tensors, strict=True):
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return replaced, buffer


def unpack(replaced: Any, buffer: torch.Tensor, copied: bool = True) -> Any:
    """The values of `pack`, with tensors that may be written to; unless `copied`, each holds the whole buffer."""
    start = 0

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal start
        if tensor.device.type != "meta":
            return tensor
        part, start = buffer[start : start + tensor.nbytes], start + _size(tensor)
        part = part.view(tensor.dtype).view(tensor.shape)
        return part.clone() if copied else part.data  # which autograd versions by itself, as a copy

    return recursively_apply(moved, replaced)


def to_device(values: Any, device: torch.device | str) -> Any:
    """Like Accelerate's `send_to_device`, with one copy for all tensors of CPU memory; each may be written to.

    The host does not wait for it.
    """
    if torch.device(device).type != "cuda":
        return send_to_device(values, device)
    replaced, buffer = pack(values, pin_memory=True)
    moved = unpack(replaced, buffer.to(device, non_blocking=True), copied=False)
    return send_to_device(moved, device, non_blocking=True)
