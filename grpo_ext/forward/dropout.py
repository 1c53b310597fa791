"""Dropout whose masks belong to tokens, so that they do not depend on how a step is cut.

Differs from torch's, whose masks come from a generator that knows the batch. Here a mask is a hash of (seed, optimizer
step, owner, position, module, call, channel); the owner of a prompt's token is the group, that of others the completion
(`algorithms.keyed_random.token_keys`). A backward pass makes the mask again. Shapes: N tokens, C channels.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..algorithms.digests import digest
from ..algorithms.keyed_random import CHANNEL, FIRST, SECOND, signed
from ..errors import refuse_split_dependence
from ..runtime.attributes import replace_forward, temporarily_set
from ..runtime.messages import logger
from .carried import Carried, carried_now


def is_keyed(module: nn.Module) -> bool:
    """Whether a module is a dropout whose masks can belong to tokens."""
    plain = isinstance(module, nn.Dropout) and type(module).forward is nn.Dropout.forward
    return plain and bool(module.p) and not module.inplace


def dropped(keys_N: torch.Tensor, channels: int, below: int) -> torch.Tensor:
    """Which numbers of each token become zero, bool (N, C): those whose hash, an int32, is below a number."""
    low_N1, high_N1 = (part[:, None] for part in keys_N.view(torch.int32).view(-1, 2).unbind(1))
    hash_NC = low_N1 ^ (torch.arange(channels, dtype=torch.int32, device=keys_N.device) * CHANNEL)
    hash_NC.bitwise_xor_((hash_NC >> 16).bitwise_and_(0xFFFF)).mul_(FIRST).bitwise_xor_(high_N1)
    hash_NC.bitwise_xor_((hash_NC >> 15).bitwise_and_(0x1FFFF)).mul_(SECOND)
    return hash_NC < below


class _Masked(torch.autograd.Function):
    """(values (..., C) of N tokens, keys (N,), key of a module and its call, rate) -> values with dropout."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, keys_N: torch.Tensor, module: int, rate: float) -> torch.Tensor:
        ctx.save_for_backward(keys_N)
        ctx.others = module, rate
        below, scale = min(round(rate * 2**32), 2**32 - 1) - 2**31, 1 / (1 - rate) if rate < 1 else 0.0
        if values.is_cuda and values.element_size() <= 4 and (kernel := _kernel()) is not None:
            return kernel(values, keys_N, module, below, scale)
        return (values * scale).masked_fill_(dropped(keys_N ^ module, values.size(-1), below).view(values.shape), 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Masked.apply(gradient, *ctx.saved_tensors, *ctx.others), None, None, None


@functools.cache
def _kernel() -> Callable[..., torch.Tensor] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from .dropout_kernel import masked

    return masked


@functools.cache
def _module_key(name: str, call: int) -> int:
    return signed(int(digest(name, str(call)), 16))


@contextmanager
def keyed_dropout(model: nn.Module, strict: bool) -> Iterator[None]:
    """Inside, dropout is that of the tokens that a forward carries; without gradients and tokens there is none.

    Not `strict`: masks that cannot belong to tokens are torch's.

    Raises:
        SplitDependentError: a forward with gradients carries no tokens, or not those of a module's input.
    """
    with ExitStack() as restored:
        for name, module in model.named_modules():
            if is_keyed(module) and not hasattr(module.forward, "of_grpo_ext"):
                restored.enter_context(temporarily_set(module, forward=module.forward))
                replace_forward(module, functools.partial(_drop, name, strict), mark=name)
        yield


@torch.compiler.disable
def _drop(name: str, strict: bool, below: Callable[..., Any], module: Any, input: torch.Tensor) -> torch.Tensor:
    carried = carried_now() or Carried()
    keys_BL = carried.keys_BL
    if not (module.p and module.training) or (keys_BL is None and not torch.is_grad_enabled()):
        return input
    # an input is (B, L, C) or (B * L, C)
    if keys_BL is None or input.shape[:-1] not in (keys_BL.shape, keys_BL.flatten().shape):
        why = (
            "runs on rows that are not those of a micro-batch, so its mask belongs to no completion; in a loss, pass "
            "on all rows in their order (an advantage of 0 leaves a row out); run what computes no loss in "
            "torch.no_grad(); under FSDP use gradient_checkpointing=True instead of activation_checkpointing"
        )
        if keys_BL is not None:
            why = f"gets an input {tuple(input.shape)} without an axis of the forward's tokens, to which masks belong"
        reason = f"{name} (p={module.p:g}) {why}. A rate of 0 avoids this, or disable_dropout=True for all rates"
        refuse_split_dependence([reason], allow=not strict)
        logger.warning_once(
            "Not every mask of dropout belongs to a token: allow_split_dependent=True leaves these to torch."
        )
        return below(module, input)
    call = carried.calls.get(name, 0)
    carried.calls[name] = call + 1
    keys_N = keys_BL.flatten().to(input.device)
    return _Masked.apply(input, keys_N, _module_key(name, call), module.p)
