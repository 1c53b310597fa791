"""What sampling ahead of training gains (`rollout_lag`): `python -m tests.bench.ahead`, some minutes, one JSON.

Medians of interleaved runs, in seconds per step, from the end of the second step to the end of the last. A device of
its own is simulated: what runs there waits for as long as it is told and returns random tokens (sampling) or a constant
(old log-probabilities, which no run without a lag needs here).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.forward.runner import ForwardRunner
from grpo_ext.rollouts import engine
from tests.support.benches import SETTINGS, Clock
from tests.support.tiny import letter_reward, prompts, tiny_model, tiny_tokenizer

STEPS, FIRST, LENGTH = 14, 2, 48
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}


def waiting_sampler(seconds: Iterator[float]) -> Any:
    tokens = random.Random(1)

    def sample(model: Any, rows: Any, *args: Any) -> list[list[int]]:
        time.sleep(next(seconds))
        return [[tokens.randrange(3, 30) for _ in range(LENGTH)] for _ in rows]

    return sample


def elsewhere(runner: Any, model: Any, rows: Any, *args: Any) -> torch.Tensor:
    """Log-probabilities that another device has computed, and the wait for them is in that for the sampler."""
    return torch.full((sum(rows.completions_B),), -3.0)


def seconds_per_step(
    lag: int, sampling: list[float] | None = None, reward: float = 0.0, scores_here: bool = True
) -> tuple[float, float]:
    """Of a run; and the share of them in which rollout batches are made or waited for."""
    spent: list[float] = []
    prepare = GRPOTrainer._prepare_inputs

    def prepared(trainer: Any, rows: Any) -> Any:
        start = time.perf_counter()
        try:
            return prepare(trainer, rows)
        finally:
            spent.append(time.perf_counter() - start)

    def score(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        time.sleep(reward)
        return letter_reward(prompts, completions)

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder,
            rollout_chunk_size=32,
            max_completion_length=LENGTH,
            max_steps=STEPS,
            rollout_lag=lag,
            **SETTINGS,
        )
        trainer = GRPOTrainer(tiny_model(**SHAPE), score, args, prompts(64), processing_class=tiny_tokenizer())
        trainer.add_callback(clock := Clock())
        sampler = engine.sample_chunk if sampling is None else waiting_sampler(iter(sampling))
        log_probs = ForwardRunner.rollout_log_probs if scores_here else elsewhere
        with (
            mock.patch.object(engine, "sample_chunk", sampler),
            mock.patch.object(ForwardRunner, "rollout_log_probs", log_probs),
            mock.patch.object(GRPOTrainer, "_prepare_inputs", prepared),
            mock.patch("builtins.print"),
        ):
            trainer.train()
        took = clock.ends[-1] - clock.ends[FIRST - 1]
        return took / (STEPS - FIRST), sum(spent[FIRST:]) / took


def endless_buffer(sampling: list[float], training: float) -> float:
    """Seconds per step if sampling never waited for training, and training took what was ready, of whatever age."""
    ready, done, ends = 0.0, 0.0, []
    for seconds in sampling[:STEPS]:
        ready += seconds
        done = max(done, ready) + training
        ends.append(done)
    return (ends[-1] - ends[FIRST - 1]) / (STEPS - FIRST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="one row of the table")
    given = parser.parse_args()
    rounds = given.rounds
    torch.set_num_threads(1)
    instant = [0.0] * (STEPS + 3)
    seconds_per_step(0, instant)  # warm-up
    training = statistics.median(seconds_per_step(0, instant)[0] for _ in range(3))
    equal = [training] * (STEPS + 3)
    draw = random.Random(2)
    ragged = [training * draw.lognormvariate(-0.32, 0.8) for _ in equal]  # a mean of about one training step
    shapes: dict[str, dict[str, Any]] = {
        "a reward waits, sampling takes no time": {"sampling": instant, "reward": training, "scores_here": False},
        "a device of its own": {"sampling": equal, "scores_here": False},
        "a server, old log-probabilities here": {"sampling": equal},
        "a device of its own, ragged": {"sampling": ragged, "scores_here": False},
        "a reward waits, the same cores": {"reward": training},
        "the same cores": {},
    }
    shapes = {name: shape for name, shape in shapes.items() if given.only in (None, name)}
    cases = {
        name: [(f"lag {lag}", {"lag": lag, **shape}) for lag in ((0, 1, 2) if "device" in name else (0, 1))]
        for name, shape in shapes.items()
    }
    found: dict[str, dict[str, list[float]]]
    found = {name: {label: [] for label, _ in runs} for name, runs in cases.items()}
    parts: list[float] = []  # of a step without a lag: sampling
    for _ in range(rounds):
        for name, runs in cases.items():
            for label, settings in runs:
                seconds, part = seconds_per_step(**settings)
                found[name][label].append(seconds)
                if (name, label) == ("a device of its own", "lag 0"):
                    parts.append(part)
    table = {name: {label: statistics.median(times) for label, times in rows.items()} for name, rows in found.items()}
    own = found.get("a device of its own", {})
    ideal = {  # of each round: the longer of sampling and of training without a lag
        label: statistics.median(
            max(part, 1 - part) * whole / took for part, whole, took in zip(parts, own["lag 0"], times)
        )
        for label, times in own.items()
    }
    if "a device of its own, ragged" in table:
        table["a device of its own, ragged"]["no limit to the lag (computed)"] = endless_buffer(ragged, training)
    print(json.dumps({"waits": training, "seconds_per_step": table, "share_of_ideal": ideal, "all": found}, indent=1))


if __name__ == "__main__":
    main()
