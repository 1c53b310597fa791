"""A trainer's rollouts under a test's hand: completions that are given, and forwards that count as collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from grpo_ext import GRPOTrainer


def give_completions(trainer: GRPOTrainer, rows: Sequence[list[int]]) -> None:
    """Let every rollout batch have these completions, by the place of the transcript."""

    def generate(transcripts: Sequence[Any], config: Any, num_generations: int) -> list[Any]:
        return [(list(rows[transcript.place]), None) for transcript in transcripts]

    trainer._rollouts.worker.engine.generate = generate  # type: ignore[method-assign]


def share_forwards(trainer: GRPOTrainer) -> None:
    """Let sampling believe that processes share the weights, as under FSDP and ZeRO-3."""
    worker = trainer._rollouts.worker
    engine: Any = worker.engine
    worker.settings = engine.settings = dataclasses.replace(engine.settings, sharded=True)
