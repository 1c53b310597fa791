"""A trainer's rollouts under a test's hand: completions that are given, and forwards that count as collectives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.sampling.engine import EngineSettings, sample_chunk
from grpo_ext.sampling.turn import Turn


def sampled_chunk(
    model: Any,
    prompts: Sequence[list[int]],
    keys_B: torch.Tensor,
    config: Any,
    ends: Sequence[int],
    device: str = "cpu",
    multiple: int | None = None,
    compact: bool = False,
) -> list[list[int]]:
    """What `sample_chunk` samples after prompts."""
    rows = [Transcript(key, prompt_ids=list(ids)) for ids, key in zip(prompts, keys_B.tolist())]
    pad = config.pad_token_id or 0
    settings = EngineSettings(torch.device(device), None, filler=0, pad=pad, multiple=multiple, compact=compact)
    with torch.no_grad():
        return [row.ids for row in sample_chunk(model, rows, config, settings)]


def give_completions(
    trainer: Any, rows: Sequence[list[int]], columns_of: Callable[[int], Mapping[str, Any]] = lambda place: {}
) -> None:
    """Let every rollout batch have these completions, and their columns, by the place of the transcript."""

    def generate(transcripts: Sequence[Any], config: Any, sizes: Any) -> list[Any]:
        return [Turn(list(rows[t.place]), columns_of(t.place)) for t in transcripts]

    trainer._rollouts.worker.engine.generate = generate


def share_forwards(trainer: Any) -> None:
    """Let sampling believe that processes share the weights, as under FSDP and ZeRO-3."""
    object.__setattr__(trainer._rollouts.worker.settings, "sharded", True)  # of the engine too
    view = trainer._view
    view.__class__ = type("Sharing", (type(view),), {"sharded": True})
