"""A user's experts that run only where a token chooses them, as in much remote code; others get no gradient."""

from typing import Any

import torch
from torch import nn

from tests.support.tiny import tiny_model


class Experts(nn.Module):
    """Adds to an MLP the expert that each token chooses, out of `count`."""

    def __init__(self, inner: nn.Module, width: int, count: int) -> None:
        super().__init__()
        self.inner, self.router = inner, nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.flatten(0, -2)
        share, chosen = self.router(flat).softmax(-1).max(-1)
        added = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            mine = (chosen == number).nonzero().squeeze(1)
            part = self.experts[number](flat[mine]) * share[mine, None]
            added = added.index_add(0, mine, part)
        return self.inner(hidden) + added.view_as(hidden)


def with_experts(count: int = 24, **changes: Any) -> Any:
    """A tiny model whose last layer has such experts."""
    model = tiny_model(**changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = model.model.layers[-1]
        layer.mlp = Experts(layer.mlp, model.config.hidden_size, count)
    return model
