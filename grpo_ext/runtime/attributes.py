"""Sets attributes of an object for a while, and replaces forwards of modules for good."""

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def temporarily_set(target: Any, **values: Any) -> Iterator[None]:
    """Inside, attributes of `target` have these values; afterwards they are as before: absent, or of its class."""
    absent, before_here = object(), {*vars(target)}
    before: dict[str, Any] = {}  # of those that have been set
    try:
        for name, value in values.items():
            known = getattr(target, name, absent)
            setattr(target, name, value)
            before[name] = known
        yield
    finally:
        for name, value in before.items():
            if name not in before_here and name in vars(target):
                delattr(target, name)
            elif value is not absent:
                setattr(target, name, value)


@contextmanager
def temporarily_set_each(changes: Iterable[tuple[Any, Mapping[str, Any]]]) -> Iterator[None]:
    """`temporarily_set` for several objects, one after the other."""
    with ExitStack() as restored:
        for target, values in changes:
            restored.enter_context(temporarily_set(target, **values))
        yield


@contextmanager
def left_as_it_was(model: Any) -> Iterator[None]:
    """Inside, buffers of `model` are copies; afterwards it has its own, and each module trains or not as before."""
    before = [(module, module.training, {**module._buffers}) for module in model.modules()]
    try:
        for (module, *_), copies in zip(before, copy.deepcopy([buffers for *_, buffers in before]), strict=True):
            module._buffers.update(copies)  # one that modules share stays shared
        yield
    finally:
        for module, training, buffers in before:
            module.training = training
            module._buffers.update(buffers)


def replace_forward(module: Any, run: Callable[..., Any], mark: Any) -> None:
    """Let `run(below, module, *args, **kwargs)` replace a module's forward, `below`; `mark` is its `of_grpo_ext`."""
    # the function: a deep copy of the module would call a bound method with these weights
    bound = module.forward
    below: Callable[..., Any] = getattr(bound, "__func__", lambda module, *args, **kwargs: bound(*args, **kwargs))

    @functools.wraps(type(module).forward)  # `generate` checks its arguments against this signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(below, self, *args, **kwargs)

    forward.of_grpo_ext = mark  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)
