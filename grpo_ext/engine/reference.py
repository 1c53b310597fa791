"""The reference model's start: TRL reloads it by name, so a model without a name gets a folder to be reloaded from.

Used once, while the trainer is built.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def base_model_of(model: Any) -> Any:
    """The transformers model under a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def reference_snapshot(model: Any, beta: float, peft_config: Any) -> Iterator[None]:
    """Give a nameless in-memory model a name for the time in which TRL builds its reference model from it.

    With an adapter the reference is the model without it, and with `beta` zero there is none.
    """
    has_adapter = peft_config is not None or hasattr(model, "peft_config")
    named = not isinstance(model, nn.Module) or bool(getattr(model.config, "_name_or_path", None))
    if beta == 0.0 or has_adapter or named:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="grpo_ext_reference_") as folder:
        model.save_pretrained(folder)
        model.config._name_or_path = folder
        try:
            yield
        finally:
            model.config._name_or_path = ""
