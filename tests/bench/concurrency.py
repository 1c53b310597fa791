"""What it gains to do parts of a step at once, as one JSON: seconds per step, medians of interleaved runs.

    python -m tests.bench.concurrency ahead     `rollout_lag`; some minutes
    python -m tests.bench.concurrency rewards   `reward_workers`; two minutes

A device of its own is simulated: what runs there waits for as long as it is told and returns random tokens (sampling)
or a constant (old log-probabilities, which no run without a lag needs here).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback

from grpo_ext.forward.runner import ForwardRunner
from grpo_ext.rollouts import engine
from grpo_ext.rollouts.transcript import Sampled
from tests.support.tiny import letter_reward, prompts, tiny_model
from tests.support.trainers import make

STEPS, FIRST = 14, 2  # of a run; those before it is timed
LENGTH = 48


class Clock(TrainerCallback):
    """When steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def seconds_per_step(model: Any, reward: Callable[..., list[float]], **settings: Any) -> float:
    sizes = {"global_batch_size": 32, "per_device_train_batch_size": 16, "num_generations": 8}
    with tempfile.TemporaryDirectory() as folder, mock.patch("builtins.print"):
        parts = {"train_dataset": prompts(64), "callbacks": [clock := Clock()]}
        # nothing is learned, so that all steps take the same time
        trainer = make(folder, model, reward, **parts, **sizes, max_steps=STEPS, learning_rate=1e-6, **settings)
        trainer.train()
        return (clock.ends[-1] - clock.ends[FIRST - 1]) / (STEPS - FIRST)


def medians(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    times = [{name: run() for name, run in cases.items()} for _ in range(rounds)]
    return {name: statistics.median(one[name] for one in times) for name in cases}


# ---- rollout_lag ----


def waiting_sampler(seconds: Iterator[float]) -> Any:
    tokens = random.Random(1)

    def sample(model: Any, rows: Any, *args: Any) -> list[Sampled]:
        time.sleep(next(seconds))
        return [Sampled([tokens.randrange(3, 30) for _ in range(LENGTH)]) for _ in rows]

    return sample


def scored_elsewhere(forwards: Any, model: Any, rows: Any, *args: Any) -> tuple[torch.Tensor, None]:
    """Log-probabilities that another device has computed, and the wait for them is in that for the sampler."""
    return torch.full((sum(rows.completions_B),), -3.0), None


def with_lag(lag: int, sampling: list[float] | None = None, reward_s: float = 0.0, scores_here: bool = True) -> float:
    """Seconds per step where sampling takes these times (None: is done here), and a reward waits."""

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        time.sleep(reward_s)
        return letter_reward(prompts, completions)

    sampler = engine.sample_chunk if sampling is None else waiting_sampler(iter(sampling))
    forwards = ForwardRunner.rollout_log_probs if scores_here else scored_elsewhere
    model = tiny_model(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    sizes = {"rollout_chunk_size": 32, "max_completion_length": LENGTH}
    with (
        mock.patch.object(engine, "sample_chunk", sampler),
        mock.patch.object(ForwardRunner, "rollout_log_probs", forwards),
    ):
        return seconds_per_step(model, reward, rollout_lag=lag, **sizes)


def ahead(rounds: int) -> dict[str, Any]:
    instant = [0.0] * (STEPS + 3)
    with_lag(0, instant)  # warm-up
    training = statistics.median(with_lag(0, instant) for _ in range(3))
    draw = random.Random(2)
    ragged = [training * draw.lognormvariate(-0.32, 0.8) for _ in instant]  # a mean of about one training step
    equal = [training for _ in instant]
    shapes: dict[str, dict[str, Any]] = {
        "a reward waits, sampling takes no time": {"sampling": instant, "reward_s": training, "scores_here": False},
        "a device of its own": {"sampling": equal, "scores_here": False},
        "a server, old log-probabilities here": {"sampling": equal},
        "a device of its own, ragged": {"sampling": ragged, "scores_here": False},
        "the same cores": {},
        "a reward waits, the same cores": {"reward_s": training},
    }
    cases = {
        f"{name}, lag {lag}": partial(with_lag, lag, **shape)
        for name, shape in shapes.items()
        for lag in ((0, 1, 2) if "device" in name else (0, 1))
    }
    return {"waits": training, "seconds_per_step": medians(cases, rounds)}


# ---- reward_workers ----


def with_workers(workers: int, milliseconds: float, computes: bool) -> float:
    """Seconds per step with a reward that computes (processor time) or waits for so long for each completion."""

    def reward(completions: list[str], **columns: Any) -> list[float]:
        seconds = len(completions) * milliseconds / 1000
        end = time.thread_time() + seconds
        if not computes:
            time.sleep(seconds)
        while computes and time.thread_time() < end:
            pass
        return [float(len(text) % 5) for text in completions]

    sizes = {"rollout_chunk_size": 8, "max_completion_length": 16}
    return seconds_per_step(tiny_model(), reward, reward_workers=workers, **sizes)


def rewards(rounds: int) -> dict[str, Any]:
    with_workers(0, 0.0, True)  # warm-up
    cases = {
        f"{kind}, {workers} workers": partial(with_workers, workers, 20.0, kind == "computes")
        for kind in ("computes", "waits")
        for workers in (0, 1, 2)
    }
    return {"seconds_per_step": medians({**cases, "no reward": partial(with_workers, 0, 0.0, True)}, rounds)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ahead", "rewards"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps((ahead if options.what == "ahead" else rewards)(options.rounds), indent=1))
