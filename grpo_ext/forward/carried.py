"""What the tokens of a forward carry to modules deep in the model: experts to replay, and keys of dropout.

A module is given hidden states and no more. So what belongs to their tokens is kept beside the forward that runs, per
thread, and found again by layers that gradient checkpointing recomputes in the backward pass.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..runtime.attributes import temporarily_set_each


class Carried:
    """What the tokens of a pass carry: of a whole forward, or of its prompts, or of the completions after these."""

    def __init__(
        self,
        routing: Any = None,  # a `Routing`
        keys_BL: torch.Tensor | None = None,  # of dropout, int64; None: without dropout
        first: int = 0,  # the number of the pass's first token among those of the forward
    ) -> None:
        self.routing, self.keys_BL, self.first = routing, keys_BL, first
        self.calls: dict[str, int] = {}  # of dropout, by module

    @classmethod
    def of(cls, targets: Any, ids_BL: Any, first: int = 0) -> "Carried":
        """What `Targets` have for a pass over these ids."""
        keys_N = targets.dropout_N
        keys_BL = None if keys_N is None else keys_N[first : first + ids_BL.numel()].view_as(ids_BL)
        return cls(targets.routing, keys_BL, first)


_running: ContextVar[Carried | None] = ContextVar("running", default=None)


def carried_now() -> Carried | None:
    """What the forward that runs on this thread carries; None outside of one."""
    return _running.get()


@contextmanager
def _inside(carried: Carried) -> Iterator[None]:
    token = _running.set(carried)
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def carrying(model: Any, carried: Carried) -> Iterator[None]:
    """Inside, modules of `model` find what the tokens carry, also in layers that are recomputed."""
    if carried.routing is None and carried.keys_BL is None:
        yield
        return
    name, modules = "_gradient_checkpointing_func", model.modules() if torch.is_grad_enabled() else ()
    found = ((module, getattr(module, name, None)) for module in modules)
    replaced = ((m, {name: functools.partial(_checkpoint, below, carried)}) for m, below in found if below is not None)
    with _inside(carried), temporarily_set_each(replaced):
        yield


def _checkpoint(checkpoint: Callable[..., Any], carried: Carried, layer: Callable[..., Any], *args: Any) -> Any:
    """The recomputation of a layer finds the same, and counts its calls from where the layer began."""
    begin = {**carried.calls}

    def run(*args: Any) -> Any:
        carried.calls = {**begin}
        with _inside(carried):
            return layer(*args)

    return checkpoint(run, *args)
