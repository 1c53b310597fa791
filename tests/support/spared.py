"""What libraries do again and again that says nothing here: no accelerator is there, no part of a model is compiled."""

from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import other


def spare() -> None:
    """Leave it out in this process, and in those that it forks: a twentieth of a tiny run."""
    backends: tuple[Any, ...] = (torch.cuda, torch.xpu, torch.mtia)
    for backend in backends:
        backend.traceback = SimpleNamespace(format_stack=list)  # whenever a seed is set
    other.has_compiled_regions = lambda module: False  # walks all modules whenever a model is unwrapped
