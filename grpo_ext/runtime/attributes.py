"""Attributes of an object that hold for a while."""

from __future__ import annotations

from collections.abc import Iterator
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
