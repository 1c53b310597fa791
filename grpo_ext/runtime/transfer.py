"""Moves tensors to a device together, in one copy that the host does not wait for."""

import math
from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device

_ALIGNMENT = 16  # bytes; of the largest element


def to_device(values: Any, device: torch.device | str) -> Any:
    """Like Accelerate's `send_to_device`, with one copy for all tensors of CPU memory; each may be written to."""
    if torch.device(device).type != "cuda":
        return send_to_device(values, device)
    tensors: list[torch.Tensor] = []
    recursively_apply(lambda tensor: tensors.append(tensor), values)
    hosted = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    sizes = [math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT for tensor in hosted]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, tensor in zip(buffer.split(sizes), hosted, strict=True):
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    parts = iter(zip(buffer.to(device, non_blocking=True).split(sizes), hosted, strict=True))

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor.to(device, non_blocking=True)
        part, source = next(parts)
        return part[: source.nbytes].view(source.dtype).view(source.shape).clone()

    return recursively_apply(moved, values)
