"""Sampling in the precision of training: the weights that autocast casts in every forward are cast once.

Differs from TRL. There the model of an adapter samples in float32, because PEFT generates with the model inside the one
whose forward autocasts, and any other model casts all its weights for every token. Used by rollouts.build.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..runtime.collectives import shards_parameters

_CAST = (nn.Linear, Conv1D)  # of these types, not of subclasses, autocast casts all parameters


@contextmanager
def half_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, and under autocast to `dtype`, the model computes what autocast computes, with weights cast before.

    The float32 parameters of linear layers, adapters included, are replaced by copies, and put back afterwards. Norms,
    embeddings and buffers stay, because autocast leaves them in float32; so does a layer whose `forward` was replaced.
    The copies need half of the memory of these parameters, and do not follow them.
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
    """Inside, a model that is trained with `bf16` or `fp16` generates in that precision; any other as it is.

    Under FSDP and DeepSpeed, which cast and gather weights themselves, and with quantised weights nothing changes.
    """
    quantised = any(getattr(module, "is_quantized", False) for module in model.modules())  # PEFT's wrapper lacks it
    half = accelerator.native_amp and accelerator.mixed_precision in ("bf16", "fp16")
    if not half or quantised or shards_parameters(accelerator):
        yield
        return
    # without autocast's cache, which outlives this block inside an autocast of the user's
    with ExitStack() as stack:
        stack.enter_context(accelerator.autocast(AutocastKwargs(cache_enabled=False)))
        stack.enter_context(half_weights(model, torch.get_autocast_dtype(accelerator.device.type)))
        yield
