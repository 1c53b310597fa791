"""Finds where a number that is not finite came from: the weights, the first module that produced it, or the loss.

A loss scale can fix gradients that overflow, but not a forward pass. Runs only after a step's loss, or the norm of its
gradient, was not finite, before the optimizer acts on it; and before weights are written.
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import PrecisionError
from ..runtime.collectives import local_part, raise_on_all


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def is_finite(value: Any) -> bool:
    return all(tensor.isfinite().all() for tensor in _tensors(value))


@torch.no_grad()
def bad_weights(model: torch.nn.Module) -> list[str]:
    """Names of trained weights that are not finite, in the part that this process holds; they are not copied."""
    parts = [(name, local_part(p)) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, part in parts if part.numel() and not torch.linalg.vector_norm(part, torch.inf).isfinite()]


def refuse_bad_weights(model: torch.nn.Module, at_start: Collection[str], step: int) -> None:
    """Raise a PrecisionError where trained weights are no longer finite, on all processes together."""
    with raise_on_all("the trained weights"):
        if names := [name for name in bad_weights(model) if name not in at_start]:
            raise PrecisionError(
                f"after step {step} trained weights are not finite, {names[0]} and {len(names) - 1} others, so no "
                "checkpoint of them is written; resume from an earlier one, with a lower learning_rate."
            )


@contextmanager
def first_module(model: torch.nn.Module, backward: bool = False) -> Iterator[list[str]]:
    """Inside, the list gets the first module whose inputs are finite and whose output is not; inner modules first.

    With `backward` it gets every module whose output has a gradient that is not finite, from the loss on.
    """
    first: list[str] = []

    def look(module: torch.nn.Module, inputs: Any, output: Any, name: str) -> None:
        place = f"{name or 'the model'} ({type(module).__name__})"
        if backward:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: None if is_finite(gradient) else first.append(place))
        elif not first and not is_finite(output) and is_finite(inputs):
            first.append(place)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(functools.partial(look, name=name)).remove)
        yield first


def explanation(model: torch.nn.Module, modules: Sequence[str], fp16: bool) -> str:
    if weights := bad_weights(model):
        return (
            f"the parameter {weights[0]} is not finite; resume from an earlier checkpoint, with a lower learning rate"
        )
    advice = (
        "float16 holds numbers up to 65504, and no loss scale can fix a forward pass: use bf16=True or float32"
        if fp16
        else "check that the model's inputs and weights are of ordinary size"
    )
    if modules:
        return f"the forward pass overflowed, first in {modules[0]}; {advice}"
    return (
        f"every module's output is finite, but the loss is not: rewards, importance ratios or a KL term are too large; "
        f"{advice}"
    )
