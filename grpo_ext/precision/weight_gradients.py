"""Weight gradients in float32 under autocast, so that the update in half precision does not depend on the split.

Autocast rounds the gradient of a float32 weight in every backward pass, and a sum of rounded parts depends on how the
step was cut. Here the same half-precision operands are multiplied, but the product is summed and returned in float32,
as Megatron and TransformerEngine do for accuracy. Outputs and input gradients keep their bits.
"""

import itertools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from ..runtime.attributes import temporarily_set_each


def float32_weight_gradients(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, under autocast, the modules in `COVERED` return the gradients of their float32 weights unrounded.

    Other gradients are as autocast leaves them, and so are those of a linear layer whose forward a user replaced.
    Embeddings, norms and grouped products of experts are float32 under autocast anyway; the head sums in float32.
    Backward passes have to run inside, too.
    """
    pairs = itertools.product(model.modules(), COVERED.values())
    covered = ((module, forward, vars(module).get("forward")) for module, (covers, forward) in pairs if covers(module))
    # a method: torch.compile recognises one that is built again, and compiles it once
    return temporarily_set_each(
        (m, {"forward": types.MethodType(f, m), "forward_below": below}) for m, f, below in covered
    )


def _multiply(func: Any, input: Tensor, weight: Tensor, *bias: Tensor | None) -> Tensor:
    """The product `func`, which is `linear` or `bmm`, where autocast is on with a float32 gradient of the weight."""
    kind = weight.device.type
    trained = any(tensor.requires_grad for tensor in (weight, *bias) if tensor is not None)
    usable = trained and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    if not (usable and weight.dtype == torch.float32 and torch.is_autocast_enabled(kind)):
        return func(input, weight, *bias)
    return _Product.apply(func, input.to(torch.get_autocast_dtype(kind)), weight, *bias)


def _in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Half-precision matrices, or batches of them, multiplied with a sum and a result in float32."""
    # with create_graph=True autograd needs a derivative, and `out_dtype` has none
    if left.device.type == "cuda" and torch.version.hip is None and not torch.is_grad_enabled():
        return (torch.mm if left.dim() == 2 else torch.bmm)(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _Product(torch.autograd.Function):
    """Saves the weight itself; the backward pass casts it again."""

    @staticmethod
    def forward(ctx: Any, func: Any, input: Tensor, weight: Tensor, *bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input if ctx.needs_input_grad[2] else None, weight)
        output = func(input, *(None if tensor is None else tensor.to(input.dtype) for tensor in (weight, *bias)))
        return torch.ops.aten._unsafe_view(output, output.shape)  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (input, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            if weight.dim() == 3:
                return (
                    None,
                    grad @ weight.to(grad.dtype).mT if needs[1] else None,
                    _in_float32(input.mT, grad) if needs[2] else None,
                )
            rows = grad.reshape(-1, grad.size(-1))
            return (
                None,
                # matrices, as autograd multiplies: a gradient of another layout would be a batch, and round differently
                (rows @ weight.to(grad.dtype)).view(*grad.shape[:-1], weight.size(1)) if needs[1] else None,
                _in_float32(rows.t(), input.reshape(-1, input.size(-1))) if needs[2] else None,
                *(rows.sum(0, dtype=torch.float32) if need else None for need in needs[3:]),
            )


class _Weight(Tensor):
    """A module's weight, or that of one expert in it: as the second factor it gets a float32 gradient."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_factor = func in (linear, torch.bmm) and not kwargs and isinstance(args[1], cls)
        with torch._C.DisableTorchFunctionSubclass():
            result = _multiply(func, *args) if is_factor else func(*args, **kwargs or {})
        return result.as_subclass(cls) if func is Tensor.__getitem__ else result


def _linear_forward(module: nn.Linear, input: Tensor) -> Tensor:
    return _multiply(linear, input, module.weight, module.bias)


def _conv1d_forward(module: Conv1D, x: Tensor) -> Tensor:
    return _multiply(linear, x.view(-1, x.size(-1)), module.weight.t(), module.bias).view(*x.shape[:-1], module.nf)


def _experts_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    trained = {name: p.as_subclass(_Weight) for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    vars(module).update(trained)  # attributes hide parameters
    try:
        below: Any = module.forward_below  # of routing replay, where that is on
        return below(*args, **kwargs) if below else type(module).forward(module, *args, **kwargs)
    finally:
        for name in trained:
            del vars(module)[name]


def _runs(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a module's forward is this one; not that of a subclass, or one that a user set on the module."""
    return getattr(module.forward, "__func__", None) is forward


def _is_of_experts(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith("transformers.models.") and kind.__name__.endswith(("Experts", "Router"))


# by the name that docs/precision.md has for them: which modules are covered, and the forward that they get
COVERED: dict[str, tuple[Callable[[nn.Module], bool], Callable[..., Any]]] = {
    "`torch.nn.Linear`": (lambda module: _runs(module, nn.Linear.forward), _linear_forward),
    "`Conv1D` of transformers": (lambda module: _runs(module, Conv1D.forward), _conv1d_forward),
    "experts of transformers and their routers": (_is_of_experts, _experts_forward),
}
