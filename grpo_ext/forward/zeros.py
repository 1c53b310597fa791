"""Small values for weights that begin at zero, while forms of the forward are compared (forward.choice)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

_SIZE = 0.25  # of the values, divided by the root of the inputs that are summed
_FEW, _SMALL = 2**16, 1e-2  # elements of a gate or a scale at most, and the size that they begin with (LayerScale)


@contextmanager
def zeros_filled(model: Any) -> Iterator[None]:
    """Inside, random values are added to parameters that are zero, or short and small, by half or more.

    A gate, a scale of 1e-5, or a convolution that begins as the identity, hides at the start what the modules behind it
    do between tokens; so does the embedding of token 0 where it is zero, with which forwards pad (`TokenRows.padded`),
    whatever sampling pads with. What ZeRO-3 has partitioned stays as it is.
    """
    generator = torch.Generator().manual_seed(0)
    _reshard(model)
    local = [getattr(parameter.data, "_local_tensor", parameter.data) for parameter in model.parameters()]
    chosen = filter(_is_mostly_zero, [*local, *(values[:1] for values in local if values.dim() == 2)])
    before = [(values, values.clone()) for values in chosen]
    try:
        for values, _ in before:
            noise = torch.randn(values.shape, generator=generator) * _SIZE / math.sqrt(math.prod(values.shape[1:]))
            values.add_(noise.to(values))
        torch.clear_autocast_cache()  # that of a user's autocast around the run holds casts of weights
        yield
    finally:
        for values, original in before:
            values.copy_(original)
        torch.clear_autocast_cache()
        _reshard(model)


def _is_mostly_zero(values: torch.Tensor) -> bool:
    size, small = values.numel(), _SMALL if values.dim() < 2 and values.numel() <= _FEW else 0.0
    return values.is_floating_point() and bool(0 < size >= 2 * (values.abs() > small).sum())


def _reshard(model: Any) -> None:
    """Let FSDP2 gather weights again that a forward left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
