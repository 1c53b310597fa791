"""The experts that sampling sent each token to (`routing_replay`); transformers keeps none of them.

Used by rollouts.engine around `generate`, and by rollouts.token_record, which brings them to the host with its own
records. Shapes: B rows, N tokens, C choices of all routers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..forward.routing import LIVE, Routing


class ExpertRecorder:
    """Records the experts of a `generate` call.

    Attributes:
        routing: what the routers record in; `forward.routing.routed` is around the call.
        steps: numbers of rows, and what `newest` returned for them; on the CPU.
    """

    def __init__(self) -> None:
        self.routing = Routing()
        self._prompts: torch.Tensor | None = None  # of the first forward
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def newest(self, rows: int) -> torch.Tensor:
        """The experts (rows, C) of the newest token of each row; `LIVE` after the forward of the prompts."""
        experts_NC = self.routing.take()
        if self._prompts is None:
            self._prompts = experts_NC.cpu()
            return experts_NC.new_full((rows, experts_NC.size(1)), LIVE)
        # without a cache, every forward runs all tokens
        return experts_NC.view(rows, -1, experts_NC.size(1))[:, -1]

    def experts(self, contexts: Sequence[int], prompts_B: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        """The experts of the prompt and the new tokens of each row, (N, C), once `Recorder.records` was called.

        The last new token never ran, so it has none (`LIVE`).

        Args:
            contexts: tokens of each prompt of the first forward.
            prompts_B: for every row the number of its prompt; lengths: its new tokens.
        """
        assert self._prompts is not None
        prompts_PWC = self._prompts.view(len(contexts), -1, self._prompts.size(1))
        last_1C = self._prompts.new_full((1, self._prompts.size(1)), LIVE)
        numbers_N, experts_NC = (torch.cat(column) for column in zip(*self.steps))
        rows = experts_NC[numbers_N.argsort(stable=True)].split(numbers_N.bincount().tolist())
        return [
            torch.cat([prompts_PWC[prompt, -contexts[prompt] :], row_NC[1:length], last_1C])
            for prompt, row_NC, length in zip(prompts_B, rows, lengths)
        ]
