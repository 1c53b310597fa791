"""What the set-up of a trainer leaves wrong: dtypes of adapters, layers that FSDP is to wrap, a thread without an end.

Repairs `trl.GRPOTrainer.__init__`, which casts the adapters of quantised models to bfloat16, where small updates are
rounded away, and stops the thread of asynchronous functions only at exit; and `accelerate.Accelerator.prepare_model`,
which refuses, under FSDP, a model that lacks one of the layers in its class's `_no_split_modules`. Until TRL and
Accelerate fix it; last seen in 1.16 and 1.15.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch


def trained_values(model: Any) -> dict[str, torch.Tensor]:
    """The trained parameters of a quantised model object, without a copy; empty for other models."""
    if not getattr(model, "is_quantized", False):
        return {}
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def repair_set_up(trainer: Any, before: Mapping[str, torch.Tensor]) -> None:
    """Undo the cast of `before`, the trained values; stop the thread once nothing refers to the trainer."""
    if getattr(trainer.model, "is_quantized", False):
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                parameter.data = before.get(name, parameter.data).to(parameter.device, torch.float32)
    if (loop := getattr(trainer, "async_loop", None)) is not None:
        weakref.finalize(trainer, loop.call_soon_threadsafe, loop.stop)


def forget_absent_layers(model: Any) -> None:
    """Remove layers that a model with an image tower lacks from those that FSDP wraps."""
    model._no_split_modules = {type(module).__name__ for module in model.modules()} & set(model._no_split_modules or ())
