"""Engines that TRL gives: what they leave of the model that is trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.rollouts.engine import ContinuousBatching
from grpo_ext.rollouts.transcript import Sampled
from tests.support.tiny import tiny_model


@pytest.mark.parametrize("fails", [False, True])
def test_continuous_batching_leaves_the_weights_as_they_were(fails):
    model = tiny_model()
    before = [(tensor.data_ptr(), tensor.dtype) for tensor in [*model.parameters(), *model.buffers()]]
    tokens = next(model.parameters()).detach().clone()

    def turn(ids: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        model.to(torch.bfloat16)  # as TRL does
        assert next(model.parameters()).dtype == torch.bfloat16
        if fails:
            raise RuntimeError("out of blocks")
        return [[1, 2] for _ in ids], None

    rows: Any = [SimpleNamespace(prompt_ids=[3], ids=[4])]
    engine = ContinuousBatching(turn, lambda: model)
    if fails:
        with pytest.raises(RuntimeError, match="out of blocks"):
            engine.generate(rows, None, 1)
    else:
        assert engine.generate(rows, None, 1) == [Sampled([1, 2])]
    assert [(tensor.data_ptr(), tensor.dtype) for tensor in [*model.parameters(), *model.buffers()]] == before
    assert torch.equal(next(model.parameters()), tokens)
