"""Reward functions that kill the process they run in, or make it run out of memory, at a chosen moment.

They score like `letter_reward` and carry its name, so the run they stand in is the run it would be without them. They
import inside, because they travel to the processes of a launch by value.
"""

from __future__ import annotations

from typing import Any

from tests.support.tiny import letter_reward

# how often a moment comes in a run of 24 steps with a checkpoint of each
MOMENTS = {
    "rollouts": 12,
    "rewards": 24,  # a call for each rollout chunk
    "window": 24,
    "optimizer": 24,
    "writing": 24,
    "listing": 240,
    "publishing": 24,
}


def dying(moment: str, at: int, rank: int = 0) -> Any:
    """SIGKILL for one process at the `at`-th time it reaches a moment; the first call of the rewards arms it."""
    rewards = [0]

    def die_later(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        import os
        import signal
        import sys

        from tests.support.tiny import letter_reward

        def die(*args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        rewards[0] += 1
        mine = int(os.environ.get("RANK", "0")) == rank
        if mine and moment == "rewards" and rewards[0] == at:
            die()
        if mine and moment != "rewards" and rewards[0] == 1:
            from grpo_ext.rollouts import engine
            from grpo_ext.run import checkpoint, keeper
            from grpo_ext.run.state import RunState
            from grpo_ext.step import gradients

            owner, name = {
                "rollouts": (engine, "sample_chunk"),
                "window": (gradients.NativeGradients, "finish"),
                "optimizer": (sys.modules["torch.optim.adam"], "adam"),
                "writing": (RunState, "save"),
                "listing": (checkpoint, "file_hash"),
                "publishing": (keeper, "publish"),
            }[moment]
            inner = getattr(owner, name)
            count = [0]

            def counted(*args: Any, **kwargs: Any) -> Any:
                count[0] += 1
                return die() if count[0] == at else inner(*args, **kwargs)

            setattr(owner, name, counted)
        return letter_reward(prompts, completions)

    die_later.__name__ = letter_reward.__name__
    return die_later


def dying_after(seconds: float, rank: int = 0) -> Any:
    """SIGKILL for one process some time after the first call of the rewards."""
    armed = []

    def die_later(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        import os
        import signal
        import threading

        from tests.support.tiny import letter_reward

        if not armed and int(os.environ.get("RANK", "0")) == rank:
            armed.append(True)
            timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        return letter_reward(prompts, completions)

    die_later.__name__ = letter_reward.__name__
    return die_later


def out_of_memory(at: int, rank: int) -> Any:
    """No memory for one process's `at`-th forward with gradients, after that forward's work is done."""
    armed = []

    def fail_later(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        import os

        import torch

        from grpo_ext import GRPOTrainer
        from tests.support.tiny import letter_reward

        if not armed:
            armed.append(True)
            inner = getattr(GRPOTrainer, "_plain_compute_loss", GRPOTrainer._compute_loss)
            GRPOTrainer._plain_compute_loss = inner
            count = [0]

            def counted(self: Any, model: Any, inputs: Any) -> Any:
                loss = inner(self, model, inputs)
                count[0] += 1
                if count[0] == at and int(os.environ.get("RANK", "0")) == rank:
                    loss.backward()
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
                return loss

            GRPOTrainer._compute_loss = counted
        return letter_reward(prompts, completions)

    fail_later.__name__ = letter_reward.__name__
    return fail_later


def jittery(longest: float) -> Any:
    """Delays of up to `longest` seconds in sampling, rewards and training; the first call of the rewards arms it."""
    armed = []

    def wait_and_score(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        import random
        import time

        from tests.support.tiny import letter_reward

        delays = random.SystemRandom()  # other ones in every process and every run

        def wait() -> None:
            time.sleep(delays.uniform(0, longest))

        if not armed:
            armed.append(True)
            from grpo_ext.rollouts import engine
            from grpo_ext.step import gradients

            places = [(engine, "sample_chunk")]
            places += [(kind, "finish") for kind in (gradients.NativeGradients, gradients.FixedPointGradients)]
            for owner, name in places:
                inner = vars(owner).get(f"_plain_{name}") or getattr(owner, name)  # once, in a launch of several runs
                setattr(owner, f"_plain_{name}", inner)

                def slow(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
                    wait()
                    return inner(*args, **kwargs)

                setattr(owner, name, slow)
        wait()
        return letter_reward(prompts, completions)

    wait_and_score.__name__ = letter_reward.__name__
    return wait_and_score


def failing_on(rank: int, at: int) -> Any:
    """An error in one process's `at`-th call of the rewards."""
    calls = [0]

    def fail_later(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        import os

        from tests.support.tiny import letter_reward

        calls[0] += 1
        if calls[0] == at and int(os.environ.get("RANK", "0")) == rank:
            raise ValueError("the judge is out")
        return letter_reward(prompts, completions)

    fail_later.__name__ = letter_reward.__name__
    return fail_later


def watched_collectives() -> Any:
    """An error for a collective that is not run by the main thread; the first call of the rewards arms it."""
    armed = []

    def watch_and_score(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        import threading

        import torch.distributed as dist

        from tests.support.tiny import letter_reward

        if not armed:
            armed.append(True)
            for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"):
                collective = getattr(dist, name)

                def watched(*args: Any, inner: Any = collective, **kwargs: Any) -> Any:
                    assert threading.current_thread() is threading.main_thread(), "a collective beside training"
                    return inner(*args, **kwargs)

                setattr(dist, name, watched)
            assert threading.current_thread() is not threading.main_thread(), "rewards were called in the main thread"
        return letter_reward(prompts, completions)

    watch_and_score.__name__ = letter_reward.__name__
    return watch_and_score
