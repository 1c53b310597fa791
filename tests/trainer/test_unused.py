"""Which parameters take part in a step of one process: where nothing adds, and where memory was short."""

from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from tests.distributed import unused
from tests.support.selection import few_of
from tests.support.tiny import letter_reward
from tests.support.trainers import change, make

MOVES = {"weight_decay": 0.5, "learning_rate": 0.1, "max_steps": 2}


def equal_rewards(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    return [100.3] * len(prompts)


@pytest.mark.parametrize("settings", [{}, {"bitwise_invariant": True}], ids=str)
def test_a_step_to_which_nothing_adds_has_gradients_of_zero(tmp_path, settings):
    """As in TRL: dense weights decay, whether or not the completions are skipped."""
    skipped, unskipped = (
        change(make(tmp_path / str(skip), reward=equal_rewards, skip_zero_contribution=skip, **MOVES, **settings))
        for skip in (True, False)
    )
    assert skipped.any()
    assert torch.equal(skipped, unskipped)


@pytest.mark.parametrize("name", few_of(["sgd", "bitwise"], ["sgd"]))
def test_a_retry_has_the_parameters_of_a_step_with_enough_memory(tmp_path, monkeypatch, name):
    expected, used = unused.run(tmp_path / "enough", name, letter_reward, max_steps=2)
    inner, failures = GRPOTrainer._loss_of, list[int]()

    def fails_once(*args: Any) -> torch.Tensor:
        loss = inner(*args)
        if len(failures) < 2:  # the second micro-batch of the first attempt
            failures.append(1)
            if len(failures) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss

    monkeypatch.setattr(GRPOTrainer, "_loss_of", fails_once)
    retried, used_again = unused.run(tmp_path / "retried", name, letter_reward, max_steps=2)
    assert used_again == used
    assert (retried - expected).norm() <= 1e-5 * expected.norm()
