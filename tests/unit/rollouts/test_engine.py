"""Engines of TRL leave the model that is trained as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_ext.rollouts.engine import ContinuousBatching
from grpo_ext.rollouts.transcript import Transcript
from tests.support.tiny import tiny_model


def test_continuous_batching_leaves_the_weights_as_they_were():
    model = tiny_model()
    before = [(p.data_ptr(), p.dtype, p.detach().clone()) for p in model.parameters()]

    def turn(*args: Any) -> Any:
        model.to(torch.bfloat16)  # as TRL does
        raise RuntimeError("out of blocks")

    with pytest.raises(RuntimeError, match="out of blocks"):
        ContinuousBatching(turn, lambda: model).generate([Transcript({}, 0, prompt_ids=[3])], None, 1)
    for parameter, (address, dtype, values) in zip(model.parameters(), before, strict=True):
        assert (parameter.data_ptr(), parameter.dtype) == (address, dtype)
        assert torch.equal(parameter, values)
