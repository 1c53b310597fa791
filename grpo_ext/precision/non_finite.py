"""Where a number that is not finite came from: the weights, the first module that produced it, or the loss.

A loss scale mends gradients that overflow, never a forward pass that does; this tells the two apart. Runs only after a
step's loss was not finite; called by the trainer before the optimizer could act on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def is_finite(value: Any) -> bool:
    """Whether all floating point tensors in a value are."""
    return all(bool(torch.isfinite(t).all()) for t in _tensors(value) if t.is_floating_point())


def bad_weight(model: torch.nn.Module) -> str | None:
    """The first parameter that is not finite, if there is one."""
    return next((name for name, parameter in model.named_parameters() if not is_finite(parameter.detach())), None)


class FirstModule:
    """Remembers the first module, in order of execution and inside before outside, that made a non-finite number."""

    def __init__(self) -> None:
        self.name: str | None = None

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside, every module of a model is watched."""

        def look(name: str) -> Any:
            def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
                if self.name is None and not is_finite(output) and is_finite(inputs):
                    self.name = f"{name or 'the model'} ({type(module).__name__})"

            return hook

        hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def explanation(weight: str | None, module: str | None, fp16: bool) -> str:
    """The message of the error."""
    if weight is not None:
        return f"the parameter {weight} is not finite any more; go on from a checkpoint before that, with a lower rate"
    advice = (
        "float16 holds numbers up to 65504 and no loss scale mends a forward pass: use bf16=True or float32"
        if fp16
        else "see that the model's inputs and weights are of ordinary size"
    )
    if module is not None:
        return f"the forward pass overflowed, first in {module}; {advice}"
    return (
        f"every module's output is finite, but the loss is not: rewards, importance ratios or a KL term are too large; "
        f"{advice}"
    )
