"""Attributes of an object that hold for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def assigned(target: Any, **values: Any) -> Iterator[None]:
    """Inside, attributes of `target` have these values; afterwards they are as before, absent ones included."""
    before = {name: getattr(target, name) for name in values if hasattr(target, name)}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)
