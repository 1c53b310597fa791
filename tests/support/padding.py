"""Models that padding, or the other rows of a batch, change."""

from collections.abc import Callable
from typing import Any

import torch

from tests.support.architectures import architecture
from tests.support.tiny import tiny_model


class CausalMean(torch.nn.Module):
    """A mean over the positions up to each token, pads too."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        count_L1 = torch.arange(1, hidden_BLH.size(1) + 1, device=hidden_BLH.device)[:, None]
        return self.inner(hidden_BLH) + hidden_BLH.cumsum(1) / count_L1


class Canon(torch.nn.Module):
    """A depthwise convolution over the last tokens, pads too; `kernel`: its start, None for random numbers."""

    def __init__(self, inner: torch.nn.Module, kernel: list[float] | None = None) -> None:
        super().__init__()
        self.inner, self.conv = inner, torch.nn.Conv1d(32, 32, 4, groups=32, padding=3, bias=False)
        if kernel is not None:
            self.conv.weight.data[:] = torch.tensor(kernel)

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        mixed_BHL = self.conv(hidden_BLH.transpose(1, 2))[..., : hidden_BLH.size(1)]
        return self.inner(hidden_BLH + mixed_BHL.transpose(1, 2))


class Scaled(torch.nn.Module):
    """A mean over the positions up to each token, scaled as by LayerScale."""

    def __init__(self, inner: torch.nn.Module, scale: float) -> None:
        super().__init__()
        self.inner, self.mean = inner, CausalMean(torch.nn.Identity())
        self.scale = torch.nn.Parameter(torch.full((32,), scale))

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden_BLH) + self.scale * self.mean(hidden_BLH)


def with_scale(scale: float) -> Any:
    return with_module(lambda inner: Scaled(inner, scale))


def with_module(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Any:
    """A Qwen2 with a user's module around the first MLP."""
    torch.manual_seed(0)
    model = tiny_model()
    model.model.layers[0].mlp = wrap(model.model.layers[0].mlp)
    return model


def with_hook(*dims: int) -> Any:
    """A Qwen2 with a user's hook that adds a mean over dimensions of (B, L, H)."""
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + output.mean(dims, keepdim=True)
    )
    return model


def recurrent_gemma() -> Any:
    blocks = {"block_types": ("recurrent", "attention"), "num_hidden_layers": 2, "lru_width": 32}
    return architecture("recurrent_gemma", attention_window_size=64, w_init_variance_scale=1.0, **blocks)


def rwkv() -> Any:
    return architecture("rwkv", attention_hidden_size=32, num_hidden_layers=2, context_length=256)
