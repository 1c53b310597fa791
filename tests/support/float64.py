"""A model in float64 throughout, for the repetition of a split that differs in float32."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch


class _Double(ModuleType):
    """torch, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def float64_throughout(model: Any) -> Iterator[Any]:
    """The model in float64, also where transformers computes in float32 whatever the weights are (norms, softmax).

    For comparisons alone: a patched global, because those places ask for `torch.float32` by name.
    """
    model.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    modules: set[Any] = {sys.modules[type(part).__module__] for part in model.modules()}
    used = {getattr(value, "__module__", None) or "" for module in modules for value in vars(module).values()}
    modules |= {sys.modules[name] for name in used if name.startswith("transformers.")}
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        for module in modules:
            if hasattr(module, "torch") and module.__name__.startswith("transformers."):
                module.torch = _Double("torch")
        try:
            yield model
        finally:
            for module in modules:
                if isinstance(getattr(module, "torch", None), _Double):
                    module.torch = torch
