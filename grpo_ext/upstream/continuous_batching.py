"""Weights that transformers' continuous batching must not change.

Repairs `trl.GRPOTrainer._generate_single_turn`, which casts the trained model itself (`.to(torch.bfloat16)`) before it
samples with continuous batching in half precision, so float32 weights are rounded at every rollout. Until TRL fixes it;
last seen in 1.16.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def keeping_weights(model: Any) -> Iterator[None]:
    """Restore the weights and buffers of a model afterwards."""
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for parameter, data in weights:
            parameter.data = data
        for module, tensors in buffers:
            module._buffers.update(tensors)
