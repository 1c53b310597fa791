"""A checkpoint counts as complete once what was written can be read, as a resume reads it."""

import collections
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

from grpo_ext.errors import CheckpointError
from tests.support.selection import few_of
from tests.support.tiny import tiny_model
from tests.support.trainers import other, parameters, ran


class Noting(AdamW):
    """Keeps an object of a kind with its state."""

    def __init__(self, weights: Any, note: Any) -> None:
        super().__init__(weights, lr=1e-3)
        self.note = note

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["note"] = self.note


def run(folder: Any, optimizer: Any = None, schedule: Any = None) -> Any:
    model = tiny_model()
    built = SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model.parameters())
    return other(folder, model=model, max_steps=2, optimizers=(built, schedule(built) if schedule else None))


UNREADABLE = {
    "scheduler.pt": (None, lambda optimizer: LambdaLR(optimizer, lambda step: np.float64(0.5) ** step)),
    "numpy._core.multiarray.scalar": (None, lambda optimizer: LambdaLR(optimizer, lambda step: np.float32(0.5))),
    "optimizer.pt": (lambda weights: Noting(weights, pathlib.PurePosixPath("a")), None),
    "collections.defaultdict": (lambda weights: Noting(weights, collections.defaultdict(int)), None),
}


@pytest.mark.parametrize("words", UNREADABLE)
def test_a_state_that_cannot_be_read_ends_the_run_at_its_first_checkpoint(tmp_path, words):
    trainer = run(tmp_path, *UNREADABLE[words])
    with pytest.raises(
        CheckpointError, match=r"checkpoint-1 could not be written .*it could not be read again: "
    ) as error:
        trainer.train()
    assert words in str(error.value)
    assert trainer.state.global_step == 1
    assert [path for path in tmp_path.iterdir() if "checkpoint" in path.name] == []


READABLE = {
    "tensors": (lambda weights: Noting(weights, torch.ones(2)), None),
    "a counter": (None, lambda optimizer: MultiStepLR(optimizer, [2])),
    "containers": (lambda weights: Noting(weights, {"a": [1, (2.0, None)], "b": {"c"}, "d": torch.float32}), None),
}


@pytest.mark.parametrize("kind", few_of(READABLE, ["a counter"]))
def test_a_state_of_plain_values_is_saved_and_resumes(tmp_path, kind):
    whole = ran(run(tmp_path / "a", *READABLE[kind]))
    again = ran(run(tmp_path / "b", *READABLE[kind]), tmp_path / "a" / "checkpoint-1")
    assert torch.equal(parameters(whole), parameters(again))
