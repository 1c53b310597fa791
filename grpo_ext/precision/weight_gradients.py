"""Weight gradients in float32 under autocast, so that the update in half precision does not depend on the split.

Autocast rounds the gradient of a float32 weight to half precision in every backward pass, and a sum of rounded parts
depends on how a step was cut. Here the same half-precision operands are multiplied, and the product is summed and
returned in float32, as Megatron and TransformerEngine do for accuracy. Nothing else changes: outputs and the gradients
of inputs keep their bits. Entered by forward.runner.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn import grad as convolution_grad
from torch.overrides import TorchFunctionMode

from ..runtime.attributes import assigned

_READ_BY_PARENTS = (nn.modules.conv._ConvNd, nn.ParameterDict, nn.ParameterList)


@contextmanager
def float32_weight_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, under autocast, backward passes of `model` return the gradients of trained float32 weights unrounded.

    Covers linear layers, `Conv1D`, convolutions, and matrix products in the forward of a module that owns the weight.
    Left out: products of one weight with another, `einsum`, and kernels that compute their own gradients. Embeddings
    and norms are float32 under autocast anyway. Backward passes, in which gradient checkpointing runs layers again,
    have to run inside too.
    """
    with ExitStack() as restored:
        for module in model.modules():
            if type(module).forward is nn.Linear.forward and "forward" not in vars(module):
                forward: Callable[..., Any] = types.MethodType(_linear_forward, module)
            elif any(p.dim() > 1 for part in _readers(module) for p in part.parameters(recurse=False)):
                forward = partial(_in_mode, module.forward)
            else:
                continue
            restored.enter_context(assigned(module, forward=forward))
        yield


def _readers(module: nn.Module) -> list[nn.Module]:
    """The modules whose own parameters are read in this module's forward; none of an embedding, nor of a container."""
    if isinstance(module, (nn.Embedding, nn.ParameterDict, nn.ParameterList)):
        return []
    return [module, *(child for child in module.children() if isinstance(child, _READ_BY_PARENTS))]


def _linear_forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return _linear(input, module.weight, module.bias)


def _in_mode(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Products():
        return below(*args, **kwargs)


class _Products(TorchFunctionMode):
    """Inside, the functions of `_INSTEAD` are replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


def _half(*weights: torch.Tensor | None) -> torch.dtype | None:
    """The dtype to which autocast casts these, if the first is float32 and any is trained; else None."""
    weight = weights[0]
    if weight is None or weight.dtype != torch.float32 or not torch.is_grad_enabled():
        return None
    kind, trained = weight.device.type, any(part is not None and part.requires_grad for part in weights)
    return torch.get_autocast_dtype(kind) if trained and torch.is_autocast_enabled(kind) else None


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A matrix product, or a batch of them, of half-precision operands, summed and returned in float32."""
    if left.device.type == "cuda" and torch.version.hip is None:
        multiply: Any = torch.mm if left.dim() == 2 else torch.bmm
        return multiply(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


# ---- Functions that are replaced ------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """Saves the weight itself and not its copy in half precision; the backward pass casts it again."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return functional.linear(input, weight.to(input.dtype), _cast(bias, input.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            rows = grad.reshape(-1, grad.size(-1))
            return (
                grad @ weight.to(grad.dtype) if needs[0] else None,
                _product(rows.t(), input.reshape(-1, input.size(-1))) if needs[1] else None,
                rows.sum(0, dtype=torch.float32) if needs[2] else None,
            )


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if (dtype := _half(weight, bias)) is None:
        return functional.linear(input, weight, bias)
    return _Linear.apply(input.to(dtype), weight, bias)


def _addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if kwargs or bias.dim() != 1 or _half(right, bias) is None:
        return torch.addmm(bias, left, right, **kwargs)
    return _linear(left, right.t(), bias)


class _Batched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        return torch.bmm(left.to(dtype), right.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (left, right), needs = ctx.saved_tensors, ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            of_left = _product_like(left, grad, right.mT.to(grad.dtype)) if needs[0] else None
            return of_left, _product_like(right, left.mT.to(grad.dtype), grad) if needs[1] else None, None


def _product_like(like: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _product(left, right) if like.dtype == torch.float32 else torch.bmm(left, right)


def _matmul(left: torch.Tensor, right: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if not kwargs:
        if right.dim() == 2 and _half(right) is not None:
            return _linear(left, right.t())
        if left.dim() == 2 and right.dim() > 1 and _half(left) is not None:
            return _linear(right.mT, left).mT
        if left.dim() == right.dim() == 3 and len(left) == len(right):
            dtype = _half(left) or _half(right)
            if dtype is not None:
                return _Batched.apply(left, right, dtype)
    return torch.matmul(left, right, **kwargs)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.name, ctx.args = name, args
        return getattr(functional, name)(input, weight.to(input.dtype), _cast(bias, input.dtype), *args)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (input, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        of_input, of_weight = (getattr(convolution_grad, f"{ctx.name}_{side}") for side in ("input", "weight"))
        others = [dim for dim in range(grad.dim()) if dim != 1]
        with torch.autocast(grad.device.type, enabled=False):
            return (
                None,
                of_input(input.shape, weight.to(grad.dtype), grad, *ctx.args) if needs[1] else None,
                of_weight(input.float(), weight.shape, grad.float(), *ctx.args) if needs[2] else None,
                grad.sum(others, dtype=torch.float32) if needs[3] else None,
                *[None] * len(ctx.args),
            )


def _convolution(
    name: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    args, batched = (stride, padding, dilation, groups), input.dim() == weight.dim()
    if (dtype := _half(weight, bias)) is None or isinstance(padding, str) or not batched:
        return getattr(functional, name)(input, weight, bias, *args)
    return _Convolution.apply(name, input.to(dtype), weight, bias, *args)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.bmm, *(getattr(torch.Tensor, n) for n in ("matmul", "__matmul__", "mm", "bmm"))),
        _matmul,
    ),
    **{getattr(functional, name): partial(_convolution, name) for name in ("conv1d", "conv2d", "conv3d")},
}
