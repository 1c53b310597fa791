"""Finds where a number that is not finite came from: the weights, the first module that produced it, or the loss.

A loss scale can fix gradients that overflow, but not a forward pass. Runs only after a step's loss was not finite,
before the optimizer acts on it.
"""

import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import PrecisionError
from ..runtime.collectives import gather_lists


def is_finite(value: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def bad_weight(model: torch.nn.Module) -> str | None:
    return next((name for name, parameter in model.named_parameters() if not is_finite(parameter.detach())), None)


@contextmanager
def first_module(model: torch.nn.Module) -> Iterator[list[tuple[int, str]]]:
    """Inside, the list gets number and name of the first module with finite inputs and another output; inner first."""
    first: list[tuple[int, str]] = []
    ran = itertools.count()

    def look(module: torch.nn.Module, inputs: Any, output: Any, name: str) -> None:
        number = next(ran)
        if not first and not is_finite(output) and is_finite(inputs):
            first.append((number, f"{name or 'the model'} ({type(module).__name__})"))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(functools.partial(look, name=name)).remove)
        yield first


@contextmanager
def explaining(what: str, model: torch.nn.Module, fp16: bool, sharded: bool) -> Iterator[None]:
    """Inside, forwards of a step whose loss is not finite run again; at the end a PrecisionError names the cause."""
    weight = None if sharded else bad_weight(model)
    with torch.no_grad(), first_module(model) as first:
        yield
    # a process may have it later from another one that shares its completions
    _, module = min(gather_lists(first), default=(0, None))
    raise PrecisionError(f"{what}: {explanation(weight, module, fp16)}.")


def explanation(weight: str | None, module: str | None, fp16: bool) -> str:
    if weight is not None:
        return f"the parameter {weight} is not finite; resume from an earlier checkpoint, with a lower learning rate"
    advice = (
        "float16 holds numbers up to 65504, and no loss scale can fix a forward pass: use bf16=True or float32"
        if fp16
        else "check that the model's inputs and weights are of ordinary size"
    )
    if module is not None:
        return f"the forward pass overflowed, first in {module}; {advice}"
    return (
        f"every module's output is finite, but the loss is not: rewards, importance ratios or a KL term are too large; "
        f"{advice}"
    )
