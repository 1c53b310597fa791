"""Stands in for a vLLM engine whose distribution differs from the trainer's, known for every completion."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.support.colocated import Engine, Params, stand_in

from .policy import COMPLETIONS, END, LENGTHS_N, PROMPTS, flat_parameters, log_probs, tokenizer


def engine_parameters() -> torch.Tensor:
    """The policy's parameters with noise, (D,): 0.03 nats per token away."""
    noise_D = torch.randn(len(flat_parameters()), generator=torch.Generator().manual_seed(0))
    return flat_parameters() + 0.005 * noise_D.double()


class NoisyEngine(Engine):
    """Samples whole completions of the policy with noise, by the seed of each row; keeps no weights of the trainer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with torch.no_grad():
            self.logps_PNT = log_probs(engine_parameters())
        self.cumulative_PN = self.logps_PNT.sum(-1).exp().cumsum(1)
        self.starts = tokenizer()(list(PROMPTS))["input_ids"]

    def load_weights(self, weights: Any) -> None:
        list(weights)

    def sample(self, prompt: list[int], params: Params) -> Any:
        number = torch.rand(1, generator=torch.Generator().manual_seed(params.seed), dtype=torch.float64)
        p = self.starts.index(list(prompt))
        n = min(int(torch.searchsorted(self.cumulative_PN[p], number)), len(COMPLETIONS) - 1)
        ids, logps = list(COMPLETIONS[n]), self.logps_PNT[p, n, : LENGTHS_N[n]].tolist()
        entries = [{token: SimpleNamespace(logprob=logp, rank=1)} for token, logp in zip(ids, logps, strict=True)]
        reason = "stop" if ids[-1] == END else "length"
        completion = SimpleNamespace(token_ids=ids, logprobs=entries, finish_reason=reason)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[completion])


@contextlib.contextmanager
def noisy_engine() -> Iterator[None]:
    """Trainers with `vllm_mode="colocate"` start a `NoisyEngine`."""
    with contextlib.ExitStack() as stack:

        def put(where: Any, name: str, value: Any, raising: bool = True) -> None:
            stack.enter_context(mock.patch.object(where, name, value, create=not raising))

        stand_in(put, NoisyEngine)
        yield
