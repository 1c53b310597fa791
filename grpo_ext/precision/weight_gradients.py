"""Weight gradients in float32 under autocast, so that the update in half precision does not depend on the split.

Autocast rounds the gradient of a float32 weight in every backward pass, and a sum of rounded parts depends on how the
step was cut. Here the same half-precision operands are multiplied, but the product is summed and returned in float32,
as Megatron and TransformerEngine do for accuracy. Outputs and input gradients keep their bits.
"""

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

_READ_BY_PARENTS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ParameterDict, nn.ParameterList)


@contextmanager
def float32_weight_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, under autocast, backward passes of `model` return the gradients of trained float32 weights unrounded.

    Covers linear layers, `Conv1D`, convolutions, and matrix products in the forward of a module that owns the weight.
    Embeddings, norms and grouped products of experts are float32 under autocast anyway; the head sums in float32.
    Backward passes have to run inside, too.

    Not covered (docs/precision.md has names): weights that are computed from other weights or that the model itself
    casts, `einsum`, norms of half-precision states on a CPU, kernels with their own gradients.
    """
    with ExitStack() as restored:
        for module in model.modules():
            attributes = vars(module)
            replaced = attributes.get("forward")
            if replaced is None and type(module).forward is nn.Linear.forward:
                forward: Callable[..., Any] = types.MethodType(_linear_forward, module)
            elif not _reads_weights(module):
                continue
            else:  # methods: torch.compile recognises one that is built again, and compiles it once
                forward = types.MethodType(_own_in_mode, module) if replaced is None else partial(_in_mode, replaced)
            # callbacks run in reverse; an attribute left behind would look like a forward that a user replaced
            restored.callback(attributes.update, {} if replaced is None else {"forward": replaced})
            restored.callback(attributes.pop, "forward")
            attributes["forward"] = forward
        yield


def _reads_weights(module: nn.Module) -> bool:
    """Whether the module's forward reads weights of its own, or those of children that only hold them."""
    if isinstance(module, (nn.Embedding, nn.ParameterDict, nn.ParameterList)):
        return False
    parts = [module, *(child for child in module.children() if isinstance(child, _READ_BY_PARENTS))]
    return any(p.dim() > 1 and p.dtype == torch.float32 for part in parts for p in part.parameters(recurse=False))


def _linear_forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return _linear(functional.linear, input, module.weight, module.bias)


def _own_in_mode(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _in_mode(type(module).forward, module, *args, **kwargs)


# the name by which pickle finds the module's own forward
_linear_forward.__name__ = _own_in_mode.__name__ = "forward"


def _in_mode(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Products():
        return below(*args, **kwargs)


class _Products(TorchFunctionMode):
    """Inside, functions of torch in `_INSTEAD` are replaced by ours, which take the original as first argument."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = _INSTEAD.get(func)
        return func(*args, **kwargs or {}) if instead is None else instead(func, *args, **kwargs or {})


def _half(weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.dtype | None:
    """The dtype to which autocast casts a float32 weight, if it or its bias is trained; else None."""
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    usable = trained and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    cast = usable and weight.dtype == torch.float32 and torch.is_autocast_enabled(weight.device.type)
    return torch.get_autocast_dtype(weight.device.type) if cast else None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Half-precision operands, or batches of them, summed and returned in float32."""
    # with create_graph=True autograd needs a derivative, and `out_dtype` has none
    if left.device.type == "cuda" and torch.version.hip is None and not torch.is_grad_enabled():
        return (torch.mm if left.dim() == 2 else torch.bmm)(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _Product(torch.autograd.Function):
    """A linear layer, or a batch of matrix products. Saves the weight itself; the backward pass casts it again."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
        if weight.dim() == 3:
            return torch.bmm(input, weight.to(input.dtype))
        output = functional.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))
        return torch.ops.aten._unsafe_view(output, output.shape)  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            if weight.dim() == 3:
                of_input = torch.bmm(grad, weight.mT.to(grad.dtype)) if needs[0] else None
                return of_input, _product(input.mT, grad) if needs[1] else None, None
            rows = grad.reshape(-1, grad.size(-1))
            # matrices, as autograd multiplies: a gradient of another layout times a weight is a batch, with other bits
            return (
                (rows @ weight.to(grad.dtype)).view(*grad.shape[:-1], weight.size(1)) if needs[0] else None,
                _product(rows.t(), input.reshape(-1, input.size(-1))) if needs[1] else None,
                rows.sum(0, dtype=torch.float32) if needs[2] else None,
            )


def _linear(func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    dtype = _half(weight, bias) if weight.dim() == 2 else None
    return func(input, weight, bias) if dtype is None else _Product.apply(input.to(dtype), weight, bias)


def _addmm(func: Any, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **scales: Any) -> torch.Tensor:
    if scales or input.dim() != 1 or _half(mat2, input) is None:
        return func(input, mat1, mat2, **scales)
    return _linear(functional.linear, mat1, mat2.t(), input)


def _matmul(func: Any, *factors: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if kwargs or len(factors) != 2:
        return func(*factors, **kwargs)
    left, right = factors
    # the weight is the left matrix if that is a parameter, else the right one, which may be a view of a parameter
    if left.dim() == 2 and isinstance(left, nn.Parameter) and right.dim() > 1 and _half(left) is not None:
        return _linear(functional.linear, right.mT, left).mT.contiguous()
    if right.dim() == 2:
        return func(left, right) if _half(right) is None else _linear(functional.linear, left, right.t())
    # excludes experts that are indexed once per token: no sum over tokens is rounded there
    batched = left.dim() == right.dim() == 3 and len(left) == len(right) and isinstance(right, nn.Parameter)
    dtype = _half(right) if batched else None
    return func(left, right) if dtype is None else _Product.apply(left.to(dtype), right, None)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, func: Any, options: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.name, ctx.options, (args, kwargs) = func.__name__, options, options
        return func(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype), *args, **kwargs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input, weight), needs, (args, kwargs) = ctx.saved_tensors, ctx.needs_input_grad[2:], ctx.options
        of_input, of_weight = (getattr(convolution_grad, f"{ctx.name}_{side}") for side in ("input", "weight"))
        with torch.autocast(grad.device.type, enabled=False):
            return (
                *(None, None),
                of_input(input.shape, weight.to(grad.dtype), grad, *args, **kwargs) if needs[0] else None,
                of_weight(input.float(), weight.shape, grad.float(), *args, **kwargs) if needs[1] else None,
                grad.sum((0, *range(2, grad.dim())), dtype=torch.float32) if needs[2] else None,
            )


def _convolution(
    func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    args = tuple(0 if option == "valid" else option for option in args)
    named = any(isinstance(option, str) for option in (*args, *kwargs.values()))  # padding="same"
    if named or input.dim() != weight.dim() or (dtype := _half(weight, bias)) is None:
        return func(input, weight, bias, *args, **kwargs)
    return _Convolution.apply(func, (args, kwargs), input.to(dtype), weight, bias)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    **{functional.linear: _linear, torch.addmm: _addmm, torch.Tensor.__matmul__: _matmul},
    **{getattr(place, name): _matmul for place in (torch, torch.Tensor) for name in ("matmul", "mm", "bmm")},
    **{getattr(functional, name): _convolution for name in ("conv1d", "conv2d", "conv3d")},
}
