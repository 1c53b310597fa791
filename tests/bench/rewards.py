"""What `reward_workers` gains: `python -m tests.bench.rewards`, a minute or two on two idle cores, one JSON.

Medians of interleaved runs, in seconds per step, from the end of the second step to the end of the last. A reward takes
20 ms a completion, of computing (processor time) or of waiting (a service that answers); a step has 32 completions in
chunks of 8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.benches import SETTINGS, Clock
from tests.support.tiny import prompts, tiny_model, tiny_tokenizer

STEPS, FIRST = 8, 2


def reward(seconds: float, computes: bool) -> Callable[..., list[float]]:
    def computing(completions: list[str], **columns: Any) -> list[float]:
        for _ in completions:
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
        return [float(len(text) % 5) for text in completions]

    def waiting(completions: list[str], **columns: Any) -> list[float]:
        time.sleep(seconds * len(completions))
        return [float(len(text) % 5) for text in completions]

    return computing if computes else waiting


def seconds_per_step(workers: int, function: Callable[..., list[float]]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder,
            rollout_chunk_size=8,
            max_completion_length=16,
            max_steps=STEPS,
            reward_workers=workers,
            **SETTINGS,
        )
        trainer = GRPOTrainer(tiny_model(), function, args, prompts(64), processing_class=tiny_tokenizer())
        trainer.add_callback(clock := Clock())
        with mock.patch("builtins.print"):
            trainer.train()
        return (clock.ends[-1] - clock.ends[FIRST - 1]) / (STEPS - FIRST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of the reward, for a completion")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds_per_step(0, reward(0.0, True))  # warm-up
    cases = [
        (f"{kind}, {workers} workers", workers, reward(given.milliseconds / 1000, kind == "computes"))
        for kind in ("computes", "waits")
        for workers in given.workers
    ]
    cases.append(("no reward to speak of", 0, reward(0.0, True)))
    times: dict[str, list[float]] = {name: [] for name, *_ in cases}
    for _ in range(given.rounds):
        for name, workers, function in cases:
            times[name].append(seconds_per_step(workers, function))
    print(json.dumps({"seconds_per_step": {n: statistics.median(t) for n, t in times.items()}, "all": times}, indent=1))


if __name__ == "__main__":
    main()
