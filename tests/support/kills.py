"""Reward functions that kill the process they run in, or make it run out of memory, at a chosen moment.

They score like `letter_reward` and carry its name, so the run they stand in is the run it would be without them. They
travel to the processes of a launch by value.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from grpo_ext import GRPOTrainer
from grpo_ext.run import checkpoint, state
from grpo_ext.sampling import engine
from grpo_ext.step import gradients
from tests.support.tiny import letter_reward

# where a process dies: a function, and how often a run of 24 steps with a checkpoint of each calls it
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "rollouts": (engine, "sample_chunk", 12),
    "rewards": (None, "", 24),  # the reward function itself, for each rollout chunk
    "window": (gradients.NativeGradients, "finish", 24),
    "optimizer": (sys.modules["torch.optim.adam"], "adam", 24),
    "writing": (state, "save_state", 24),
    "listing": (checkpoint, "file_hash", 240),
    "syncing": (checkpoint, "_sync", 312),  # ten files, then their listing and its folder, then the run's
    "publishing": (state, "publish", 24),
}


def scoring(act: Callable[[int], None], rank: int | None = None) -> Any:
    """A reward function that first acts, given the number of its call; on one process alone, if a rank is given."""
    calls = [0]

    def act_and_score(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        calls[0] += 1
        if rank is None or int(os.environ.get("RANK", "0")) == rank:
            act(calls[0])
        return letter_reward(prompts, completions)

    act_and_score.__name__ = letter_reward.__name__
    return act_and_score


def arming(arm: Callable[[], Any], rank: int | None = None) -> Any:
    """A reward function whose first call arms what happens later."""
    return scoring(lambda call: arm() if call == 1 else None, rank)


def wrap(owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
    """Put `wrapped(inner, *args)` in the place of a function; once, in a launch of several runs."""
    inner = vars(owner).get(f"_plain_{name}") or getattr(owner, name)
    setattr(owner, f"_plain_{name}", inner)
    setattr(owner, name, lambda *args, **kwargs: wrapped(inner, *args, **kwargs))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(moment: str, at: int, rank: int = 0) -> Any:
    """SIGKILL for one process at the `at`-th time it reaches a moment."""
    owner, name, _ = MOMENTS[moment]
    count = [0]

    def counted(inner: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return die() if count[0] == at else inner(*args, **kwargs)

    if owner is None:
        return scoring(lambda call: die() if call == at else None, rank)
    return arming(lambda: wrap(owner, name, counted), rank)


def dying_after(seconds: float, rank: int = 0) -> Any:
    """SIGKILL for one process some time after the first call of the rewards."""

    def arm() -> None:
        timer = threading.Timer(seconds, die)
        timer.daemon = True
        timer.start()

    return arming(arm, rank)


def out_of_memory(at: int, rank: int) -> Any:
    """No memory for one process's `at`-th forward with gradients, after that forward's work is done."""
    count = [0]

    def counted(inner: Any, *args: Any) -> Any:
        loss = inner(*args)
        count[0] += 1
        if count[0] == at:
            loss.backward()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss

    return arming(lambda: wrap(GRPOTrainer, "_loss_of", counted), rank)


def jittery(longest: float) -> Any:
    """Delays of up to `longest` seconds in sampling, rewards and training."""

    def wait() -> None:
        time.sleep(random.SystemRandom().uniform(0, longest))  # other ones in every process and every run

    def slow(inner: Any, *args: Any, **kwargs: Any) -> Any:
        wait()
        return inner(*args, **kwargs)

    def act(call: int) -> None:
        if call == 1:
            wrap(engine, "sample_chunk", slow)
            for kind in (gradients.NativeGradients, gradients.FixedPointGradients):
                wrap(kind, "finish", slow)
        wait()

    return scoring(act)


def failing_on(rank: int, at: int) -> Any:
    """An error in one process's `at`-th call of the rewards."""

    def act(call: int) -> None:
        if call == at:
            raise ValueError("the judge is out")

    return scoring(act, rank)


def sampling_fails_on(rank: int) -> Any:
    """An error in one process's next sampling."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("the engine is out")

    return arming(lambda: wrap(engine, "sample_chunk", fail), rank)


def watched_collectives() -> Any:
    """An error for a collective that is not run by the main thread."""

    def watched(inner: Any, *args: Any, **kwargs: Any) -> Any:
        assert threading.current_thread() is threading.main_thread(), "a collective beside training"
        return inner(*args, **kwargs)

    def arm() -> None:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"):
            wrap(dist, name, watched)
        assert threading.current_thread() is not threading.main_thread(), "rewards were called in the main thread"

    return arming(arm)
