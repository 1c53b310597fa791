"""Lets a vLLM engine on the CPU take new weights, which it cannot by itself; for tests alone.

Its CPU backend repacks the weights of linear layers when it loads them, so a second load has nowhere to go. Here they
stay as they are, and are multiplied by torch.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

NAME = "dispatch_cpu_unquantized_gemm"


def keep_weights() -> None:
    """Replace the repacking in every loaded module that has it."""

    def dispatch(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    import vllm.model_executor.layers.linear
    import vllm.model_executor.layers.utils  # noqa: F401

    for module in [m for name, m in sys.modules.items() if name.startswith("vllm")]:
        if hasattr(module, NAME):
            setattr(module, NAME, dispatch)


def in_float32() -> None:
    """Let TRL build its engine in float32; vLLM takes half precision for float32 models otherwise."""
    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32")
