"""Attributes of an object that hold for a while."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def assigned(target: Any, **values: Any) -> Iterator[None]:
    """Inside, attributes of `target` have these values; afterwards they are as before, absent ones included."""
    absent = object()
    before = {name: getattr(target, name, absent) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            delattr(target, name) if value is absent else setattr(target, name, value)


def wrap_forward(module: Any, around: Callable[..., Any], mark: Any = True) -> None:
    """Let the forward of a module be `around(below, module, ...)`, in a deep copy with the weights of the copy.

    Args:
        around: takes the forward so far, as a function of the module, before its arguments.
        mark: set as `of_grpo_ext` of the new forward.
    """
    # the function: a deep copy would call a bound method with the weights of the original
    bound = module.forward
    below: Callable[..., Any] = getattr(bound, "__func__", lambda module, *args, **kwargs: bound(*args, **kwargs))

    @functools.wraps(type(module).forward)  # `generate` checks its arguments against this signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(below, self, *args, **kwargs)

    forward.of_grpo_ext = mark  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)
