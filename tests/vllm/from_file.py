"""Lets a vLLM server on the CPU take weights from a file, because TRL sends them over NCCL; for tests alone.

`FileWeights` is for the worker of the server (`--worker-extension-cls`), `send_by_file` for the client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.vllm.on_the_cpu import keep_weights


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
