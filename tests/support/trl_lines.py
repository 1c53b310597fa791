"""Lines of a method of TRL's trainer, as an oracle."""

from __future__ import annotations

import inspect
import textwrap
from types import CodeType

import trl
from trl.trainer import grpo_trainer


def compiled_lines(method: str, first: str, last: str) -> CodeType:
    """The lines of `GRPOTrainer`'s method from the one that begins with `first` to the one before `last`."""
    source = inspect.getsource(getattr(trl.GRPOTrainer, method))
    for line in (first, last):
        assert source.count(f"        {line}") == 1, f"TRL no longer has the line {line!r}"
    lines = source[source.index(f"        {first}") : source.index(f"        {last}")]
    return compile(textwrap.dedent(lines), grpo_trainer.__file__, "exec")
