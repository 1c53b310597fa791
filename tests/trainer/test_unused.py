"""What adds nothing leaves no trace in one process either: fillers of a step without contributions, and retries."""

from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from tests.distributed import unused
from tests.support.tiny import letter_reward
from tests.support.trainers import BASE, change, make, native_fp16

MOVES = {"weight_decay": 0.5, "learning_rate": 0.1}


def equal_rewards(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    return [100.3] * len(prompts)


@pytest.mark.parametrize("settings", [{}, {"bitwise_invariant": True}], ids=str)
def test_a_step_to_which_nothing_adds_moves_nothing(tmp_path, settings):
    trainer = make(tmp_path / "equal", reward=equal_rewards, **MOVES, **settings)
    assert not change(trainer).any()
    assert trainer.optimizer.state_dict()["state"] == {}
    assert [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line] == [0.0] * BASE["max_steps"]
    unskipped = make(tmp_path / "run", reward=equal_rewards, skip_zero_contribution=False, **MOVES, **settings)
    assert change(unskipped).any()


def test_in_fp16_too(tmp_path, monkeypatch):
    import accelerate

    monkeypatch.setattr(accelerate.Accelerator, "__init__", native_fp16(accelerate.Accelerator.__init__))
    trainer = make(tmp_path, reward=equal_rewards, fp16=True, **MOVES)
    assert not change(trainer).any()
    assert trainer.accelerator.scaler.skipped == 0


@pytest.mark.parametrize("name", ["sgd", "bitwise"])
def test_a_retry_has_the_parameters_of_a_step_with_enough_memory(tmp_path, monkeypatch, name):
    expected, used = unused.run(tmp_path / "enough", name, letter_reward)
    inner, failures = GRPOTrainer._loss_of, list[int]()

    def fails_once(*args: Any) -> torch.Tensor:
        loss = inner(*args)
        if len(failures) < 2:  # the second micro-batch of the first attempt
            failures.append(1)
            if len(failures) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss

    monkeypatch.setattr(GRPOTrainer, "_loss_of", fails_once)
    retried, used_again = unused.run(tmp_path / "retried", name, letter_reward)
    assert used_again == used
    assert (retried - expected).norm() <= 1e-5 * expected.norm()
