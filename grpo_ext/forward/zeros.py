"""Small values for weights that begin at zero, while forms of the forward are compared (forward.choice)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

_SIZE = 0.25  # of the values, divided by the root of the inputs that are summed


@contextmanager
def zeros_filled(model: Any) -> Iterator[None]:
    """Inside, parameters of which half or more is zero have small random values there, and so has the padding's token.

    A gate, or a convolution that begins as the identity, hides at the start what the modules behind it do between
    tokens. The weights of ZeRO-3 stay as they are, unless DeepSpeed keeps them whole.
    """
    generator, before = torch.Generator().manual_seed(0), list[tuple[torch.Tensor, torch.Tensor]]()
    with torch.no_grad():
        _reshard(model)
        try:
            parameters = [getattr(parameter.data, "_local_tensor", parameter.data) for parameter in model.parameters()]
            embeddings = [values[:1] for values in parameters if values.dim() == 2]
            for values in filter(_is_mostly_zero, [*parameters, *embeddings]):
                before.append((values, values.clone()))
                size = _SIZE / math.sqrt(math.prod(values.shape[1:]))
                noise = size * torch.randn(values.shape, generator=generator)
                values.copy_(torch.where(values == 0, noise.to(values), values))
            yield
        finally:
            for values, original in reversed(before):
                values.copy_(original)
            _reshard(model)


def _is_mostly_zero(values: torch.Tensor) -> bool:
    return values.is_floating_point() and bool(0 < values.numel() >= 2 * values.count_nonzero())


def _reshard(model: Any) -> None:
    """Let FSDP2 gather weights again that a forward left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
