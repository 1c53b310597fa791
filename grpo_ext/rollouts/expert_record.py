"""The experts that sampling sent each token to (`routing_replay`); transformers keeps none of them.

Used by rollouts.engine around `generate`. Shapes: B rows, T new tokens, C choices of all routers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..forward.routing import LIVE, Routing

_AT_ONCE = 64  # tokens whose experts are brought to the host together


class ExpertRecorder:
    """Records the experts of a `generate` call.

    Attributes:
        routing: what the routers record in; `forward.routing.routed` is around the call.
    """

    def __init__(self) -> None:
        self.routing = Routing()
        self._prompts: torch.Tensor | None = None  # of the first forward
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []  # numbers of rows, experts of their newest token
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, numbers_B: torch.Tensor) -> None:
        """Take what the forward recorded from which the next tokens of these rows are drawn."""
        experts_NC = self.routing.take()
        if self._prompts is None:
            self._prompts = experts_NC.cpu()
            return
        # without a cache, every forward runs all tokens
        newest_BC = experts_NC.view(len(numbers_B), -1, experts_NC.size(1))[:, -1]
        self._steps.append((numbers_B, newest_BC))
        if len(self._steps) == _AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if self._steps:
            numbers_N, experts_NC = (torch.cat(column).cpu() for column in zip(*self._steps))
            self._on_host.append((numbers_N, experts_NC))
            self._steps.clear()

    def experts(self, contexts: Sequence[int], prompts_B: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        """The experts of each row: of its prompt and its new tokens, (prompt + T, C).

        The last new token never ran, so it has none (`LIVE`).

        Args:
            contexts: tokens of each prompt of the first forward.
            prompts_B: for every row the number of its prompt; lengths: its new tokens.
        """
        assert self._prompts is not None
        self._flush()
        prompts_PWC = self._prompts.view(len(contexts), -1, self._prompts.size(1))
        last_1C = self._prompts.new_full((1, self._prompts.size(1)), LIVE)
        rows_BTC: Sequence[torch.Tensor] = [last_1C[:0]] * len(lengths)
        if self._on_host:
            numbers_N, experts_NC = (torch.cat(column) for column in zip(*self._on_host))
            ordered_NC = experts_NC[numbers_N.argsort(stable=True)]
            rows_BTC = ordered_NC.split(numbers_N.bincount(minlength=len(lengths)).tolist())
        return [
            torch.cat([prompts_PWC[prompt, -contexts[prompt] :], row_TC[: length - 1], last_1C])
            for prompt, row_TC, length in zip(prompts_B, rows_BTC, lengths)
        ]
