"""Threads, kernels and settings that change bits; bitwise mode sets them for a run, or refuses them."""

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch.nn.attention import current_flash_attention_impl
from transformers.utils.import_utils import is_flash_linear_attention_available

from ..errors import ConfigError
from .attributes import temporarily_set_each
from .collectives import gather_lists

_ALIGNMENT = 64  # bytes; of every tensor that torch allocates on the CPU
CUBLAS, CUBLAS_VALUES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")  # read when CUDA starts
# whose products of float32 may be rounded more coarsely (TF32, bfloat16); torch refuses its older switches beside these
_BACKENDS: Any = torch.backends
_PRODUCTS = (_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn, _BACKENDS.mkldnn.matmul)


def align_memory(*models: Any) -> None:
    """Move weights and buffers on the CPU to memory with the alignment of torch's allocator.

    MKL's kernels for very small matrices round by the alignment of their operands, and a mapped file has any.
    """
    for model in models:
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
                tensor.data = tensor.data.clone()


def environment() -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch_threads": torch.get_num_threads(),
        "mkl_cbwr": os.environ.get("MKL_CBWR"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.backends.cuda.matmul.fp32_precision,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get(CUBLAS),
    }


@contextmanager
def computing_with(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def unfit_kernels(device: torch.device, linear_attention: bool) -> dict[str, Any]:
    """Kernels whose bits depend on another library or the kind of GPU, as facts for `settings.refuse_excluded`."""
    on_gpu = device.type == "cuda"
    names = sorted(set(gather_lists([torch.cuda.get_device_name(device)]))) if on_gpu else []
    return {
        "attention_kernels": current_flash_attention_impl(),
        "timed_kernels": on_gpu and linear_attention and is_flash_linear_attention_available(),
        "gpu_kinds": ", ".join(names) if len(names) > 1 else "",
    }


@contextmanager
def pinned(threads: int | None) -> Iterator[None]:
    """Inside, kernels are deterministic and `threads` CPU threads compute; a ConfigError where CUDA began otherwise."""
    if threads is None:  # not bitwise: nothing changes
        yield
        return
    if torch.cuda.is_available() and os.environ.get(CUBLAS) not in CUBLAS_VALUES:
        raise ConfigError(
            f"bitwise_invariant=True needs {CUBLAS}=:4096:8 in the environment before CUDA starts; it is "
            f"{os.environ.get(CUBLAS)!r}. Make the GRPOConfig, which sets it, before using the GPU, or set it yourself."
        )
    # filling memory costs time, and nothing here reads such memory
    switches: list[tuple[Any, dict[str, Any]]] = [(torch.backends.cudnn, {"benchmark": False})]
    switches += [(torch.utils.deterministic, {"fill_uninitialized_memory": False})]
    switches += [(backend, {"fp32_precision": "ieee"}) for backend in _PRODUCTS]
    with (
        ExitStack() as restored,
        computing_with(threads),
        patch_environment(FLASH_ATTENTION_DETERMINISTIC=1),  # transformers reads it at each call
    ):
        restored.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        torch.use_deterministic_algorithms(True)
        with temporarily_set_each(switches):
            yield
