"""Lets a vLLM engine or server on the CPU take new weights, which neither can by itself; for tests alone.

The CPU backend repacks the weights of linear layers when it loads them, so a second load has nowhere to go: here they
stay as they are, and are multiplied by torch. To a server TRL sends weights over NCCL: here they go through a file.
`FileWeights` is for the worker of the server (`--worker-extension-cls`), `send_by_file` for the client.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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


class FileWeights:
    """What a worker of the server can do besides."""

    model_runner: Any

    def take_weights(self, path: str) -> None:
        self.model_runner.model.load_weights(load_file(path).items())


def send_by_file(folder: Path) -> None:
    """Let TRL's client write the weights to a file, and tell the server where."""
    from trl.generation.vllm_client import VLLMClient

    def update(self: Any, described: Any, parameters: Any) -> None:
        path = folder / "weights.safetensors"
        save_file({name: value.detach().contiguous().clone() for name, value in parameters}, path)
        body = {"method": "take_weights", "args": [str(path)]}
        self.session.post(f"{self.base_url}/collective_rpc", json=body).raise_for_status()

    VLLMClient.update_named_params = update  # type: ignore[method-assign]
    VLLMClient.init_communicator = lambda self, device=0: None  # type: ignore[method-assign]


keep_weights()  # the worker imports this before it loads its model
