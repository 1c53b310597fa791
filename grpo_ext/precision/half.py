"""Sampling in the precision of training: the weights that autocast casts in every forward are cast once.

Differs from TRL, where a model with an adapter samples in float32, because PEFT generates with the inner model and only
the outer forward autocasts, and where any other model casts all its weights for every token. Used by rollouts.build.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..runtime.collectives import shards_parameters

_CAST = (nn.Linear, Conv1D)  # autocast casts all parameters of these types, but not of their subclasses


@contextmanager
def half_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, and under autocast to `dtype`, the model computes what autocast computes, with weights cast beforehand.

    Copies replace the float32 parameters of linear layers, adapters included, and do not follow their updates. Norms,
    embeddings and buffers stay, because autocast leaves them in float32; so do layers whose `forward` was replaced.
    """
    copies: dict[int, nn.Parameter] = {}
    with ExitStack() as restored:
        for module in model.modules():
            if type(module) not in _CAST or "forward" in vars(module):
                continue
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dtype != torch.float32:
                    continue
                if id(parameter) not in copies:
                    copies[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                restored.callback(module.register_parameter, name, parameter)
                module.register_parameter(name, copies[id(parameter)])
        yield


@contextmanager
def as_in_training(model: nn.Module, accelerator: Any) -> Iterator[None]:
    """Inside, a model that is trained with `bf16` or `fp16` generates in that precision, and any other as it is.

    Nothing changes under FSDP and DeepSpeed, which cast and gather weights themselves, or with quantised weights.
    """
    quantised = any(getattr(module, "is_quantized", False) for module in model.modules())  # PEFT's wrapper lacks it
    half = accelerator.native_amp and accelerator.mixed_precision in ("bf16", "fp16")
    if not half or quantised or shards_parameters(accelerator):
        yield
        return
    uncached = AutocastKwargs(cache_enabled=False)  # the cache would outlive this block inside a user's autocast
    with accelerator.autocast(uncached), half_weights(model, torch.get_autocast_dtype(accelerator.device.type)):
        yield
