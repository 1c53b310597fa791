"""A CUDA device simulated on the CPU: which tensor lies where, and what the host waits for.

A `SimulatedTensor` says that it is on `cuda:0` and holds its values in CPU memory. Recorded, with the line of this
package that asked for it: operators that mix devices, copies between them, synchronisations of the host, launches.
The kernels are the CPU's, and attention is a reference: nothing here says anything of speed, streams, or the rounding
of CUDA.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

CUDA = torch.device("cuda", 0)

# views and allocations: nothing runs on the device
_NO_LAUNCH = {
    *("alias", "as_strided", "detach", "detach_", "diagonal", "empty", "empty_like", "empty_strided", "expand"),
    *("lift_fresh", "new_empty", "new_empty_strided", "permute", "resize_", "select", "set_", "slice", "split"),
    *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_real"),
    *("_local_scalar_dense", "_reshape_alias", "_unsafe_view"),
}
# the host reads a value, or a size that depends on values
_READ_BY_HOST = {"_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero"}
_INDEXING = {"_index_put_impl_", "index", "index_put", "index_put_"}
_COPIES = {"_copy_from", "_to_copy", "copy_"}
# one kernel on the CPU and on CUDA, which torch takes apart for other devices
_WHOLE_ON_CUDA = ("silu_backward",)
_ATEN = torch.library.Library("aten", "IMPL")


@dataclass
class Ledger:
    """What was recorded since the last `reset`, by the line that asked for it, some with the operator's name."""

    launches: Counter[str] = field(default_factory=Counter)  # operators that would launch a kernel
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # operators for which the host waits
    to_device: Counter[str] = field(default_factory=Counter)  # copies
    to_host: Counter[str] = field(default_factory=Counter)
    mixed: Counter[tuple[str, str]] = field(default_factory=Counter)  # operators of both devices, which CUDA refuses
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # by CUDA under deterministic algorithms

    def reset(self) -> None:
        """Forget what each step does; what is wrong stays."""
        for counts in (self.launches, self.waits, self.to_device, self.to_host):
            counts.clear()


LEDGER = Ledger()


def _place() -> str:
    """The innermost line of this package on the stack; else that of another library."""
    frame, other = sys._getframe(1), "?"
    while frame is not None:
        _, inside, path = frame.f_code.co_filename.rpartition("/grpo_ext/")
        if inside:
            return f"{path}:{frame.f_lineno}"
        _, installed, path = frame.f_code.co_filename.rpartition("site-packages/")
        if installed and other == "?" and not path.startswith("torch/"):
            other = f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return other


class SimulatedTensor(torch.Tensor):
    """A tensor whose values are those of `on_cpu`, and whose device is `cuda:0`."""

    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> SimulatedTensor:
        modes = _disable_current_modes if torch._C._len_torch_dispatch_stack() else nullcontext  # none in a dispatch
        with torch._C.DisableTorchFunctionSubclass(), modes():
            meta = torch.empty_strided(on_cpu.shape, on_cpu.stride(), dtype=on_cpu.dtype, device="meta")
        backend = torch.device("simulated", 0)
        return torch.Tensor._make_subclass(cls, meta, False, dispatch_device=True, device_for_backend_keys=backend)  # type: ignore[call-arg,return-value]

    def __init__(self, on_cpu: torch.Tensor) -> None:
        self.on_cpu = on_cpu

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, values: SimulatedTensor) -> None:
        self.on_cpu = values.on_cpu.detach()

    def tolist(self) -> Any:
        LEDGER.waits["tolist", _place()] += 1
        return self.on_cpu.detach().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedTensor:
        copy = SimulatedTensor(self.on_cpu.detach().clone())
        if getattr(self, "_is_param", False):
            copy.requires_grad_(self.requires_grad)
            copy._is_param = True  # type: ignore[attr-defined]
        memo[id(self)] = copy
        return copy

    def __repr__(self, **kwargs: Any) -> str:
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type in ("cuda", "simulated")


def _dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the values in CPU memory, and record what it would do on a GPU."""
    if func is torch.ops.prim.device.default:  # half of all calls
        return torch.device("simulated", 0)
    name = func._schema.name.partition("::")[2]
    flat = _leaves((args, kwargs))
    ours = [value for value in flat if isinstance(value, SimulatedTensor)]
    others = [value for value in flat if isinstance(value, torch.Tensor) and not isinstance(value, SimulatedTensor)]
    on_device = bool(ours)
    if name in ("copy_", "_copy_from"):
        on_device = isinstance(args[0], SimulatedTensor)
    elif kwargs.get("device") is not None:
        on_device = _is_device(torch.device(kwargs["device"]))
    _record(name, args, kwargs, ours, others, on_device)

    cpu_args, cpu_kwargs = _mapped(_on_cpu, (args, kwargs))
    if name == "histc":  # of whole numbers on CUDA alone
        cpu_args = (cpu_args[0].float(), *cpu_args[1:])
    if name not in _COPIES:
        cpu_kwargs.pop("non_blocking", None)
    if "pin_memory" in cpu_kwargs:
        cpu_kwargs["pin_memory"] = False
    try:
        result = func(*cpu_args, **cpu_kwargs)
    except RuntimeError:
        if name not in ("view", "_unsafe_view"):
            raise
        result = torch.ops.aten.reshape(*cpu_args)  # strides of a reference kernel's output differ from CUDA's
    if name == "_local_scalar_dense":
        return result
    if name == "histc":
        result = result.to(args[0].dtype)
    known = {id(tensor.on_cpu): tensor for tensor in ours} | {id(tensor): tensor for tensor in others}
    meta = any(isinstance(value, torch.device) and value.type == "meta" for value in flat)

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in known:
            return known[id(value)]
        return SimulatedTensor(value) if on_device and not meta and value.device.type == "cpu" else value

    return _mapped(wrapped, result)


def _leaves(value: Any) -> list[Any]:
    """The values of nested arguments; torch's pytree takes more time than the operators of tiny models."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for part in value for leaf in _leaves(part)]


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested arguments, or a result, with other values."""
    if isinstance(value, Mapping):
        return {name: _mapped(function, part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(function, part) for part in value])
    return function(value)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, SimulatedTensor):
        return value.on_cpu
    return torch.device("cpu") if _is_device(value) else value


def _record(name: str, args: Any, kwargs: Any, ours: list[Any], others: list[Any], on_device: bool) -> None:
    if (ours or on_device) and name not in _NO_LAUNCH:
        LEDGER.launches[_place()] += 1
    if name in _COPIES:
        source = args[0] if name == "_to_copy" else args[1]
        if isinstance(source, SimulatedTensor) != on_device:
            (LEDGER.to_device if on_device else LEDGER.to_host)[_place()] += 1
        return
    if not ours:
        return
    floats = name == "cumsum" and args[0].is_floating_point()
    weighted = name == "bincount" and any(tensor is not None for tensor in args[1:2])
    if (floats or weighted) and torch.are_deterministic_algorithms_enabled():
        LEDGER.refused[name, _place()] += 1
    indices = args[1] if name in _INDEXING else ()
    masks = [i for i in indices if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
    sizeless = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name in _READ_BY_HOST or masks or sizeless:
        LEDGER.waits[name, _place()] += 1
    if any(tensor.dim() for tensor in others):
        if name in _INDEXING and isinstance(args[0], SimulatedTensor):  # CUDA copies such indices itself
            LEDGER.to_device[_place()] += len(others)
        else:
            LEDGER.mixed[name, _place()] += 1


class _Dispatch(TorchDispatchMode):
    """Allocations on the device, which no argument shows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class _DeviceNames(TorchFunctionMode):
    """Names of the device in calls of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name not in ("__get__", "device"):
            args = tuple(_device(value) for value in args)
            if "device" in kwargs:
                kwargs["device"] = _device(kwargs["device"])
        return func(*args, **kwargs)


def _device(value: Any) -> Any:
    named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return torch.device("simulated", 0) if named or _is_device(value) else value


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention with the same bits on the CPU and on the simulated device."""
    repeats = query.size(1) // key.size(1)
    key, value = (t.repeat_interleave(repeats, dim=1, output_size=query.size(1)) for t in (key, value))
    scores = (query.float() @ key.float().transpose(-1, -2)) * (scale or query.size(-1) ** -0.5)
    if is_causal:
        ones = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device)
        attn_mask = ones.tril(key.size(-2) - query.size(-2))
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -1e9) if masked else scores + attn_mask  # padding may see nothing
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


_tensor, _Generator = torch.tensor, torch.Generator


def _new_tensor(
    data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
) -> torch.Tensor:
    """`torch.tensor`, which does not pass through dispatch: made on the host, then copied."""
    if isinstance(data, (list, tuple)) and any(isinstance(value, SimulatedTensor) for value in data):
        LEDGER.waits["tensor", _place()] += len(data)
        data = [value.item() if isinstance(value, torch.Tensor) else value for value in data]
    tensor = _tensor(data, dtype=dtype)
    if device is not None and torch.device(device).type != "cpu":
        tensor = tensor.to(device)
    return tensor.requires_grad_(requires_grad)


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        return _new_tensor(data, dtype=dtype, device=device)
    wanted = {name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None}
    return data.to(**wanted) if wanted else data


@contextmanager
def thread_modes() -> Iterator[None]:
    """Inside, and in this thread alone, names of the device and allocations are those of the simulated one."""
    with _DeviceNames(), _Dispatch():
        yield


@contextmanager
def simulated_gpu() -> Iterator[Ledger]:
    """Inside, `cuda:0` is the simulated device. Torch stays changed, so a process does nothing else.

    Accelerate takes the device where `ACCELERATE_TORCH_DEVICE=cuda:0` is in the environment.
    """
    _setup_privateuseone_for_python_backend("simulated")
    torch._C._set_only_lift_cpu_tensors(True)
    for name in _WHOLE_ON_CUDA:
        _ATEN.impl(name, torch.library.fallthrough_kernel, "AutogradPrivateUse1")
    answers: dict[str, Any] = {"current_device": 0, "get_device_name": "simulated", "get_device_capability": (9, 0)}
    answers["mem_get_info"] = (80 * 2**30, 80 * 2**30)  # free, and in all
    answers |= dict.fromkeys(("_lazy_init", "set_device", "set_rng_state", "empty_cache", "synchronize", "set_stream"))
    answers |= {"get_rng_state": torch.get_rng_state(), "get_rng_state_all": [torch.get_rng_state()]}
    answers |= {"Stream": mock.Mock(), "current_stream": mock.Mock()}
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        made = {"tensor": _new_tensor, "as_tensor": _as_tensor, "Generator": lambda device=None: _Generator("cpu")}
        for name, function in made.items():
            stack.enter_context(mock.patch.object(torch, name, function))
        stack.enter_context(thread_modes())
        yield LEDGER
