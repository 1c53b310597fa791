"""Engines leave the model that is trained as it was, and what does not fit into memory is sampled in parts."""

from typing import Any

import pytest
import torch

from grpo_ext.batching.sizes import ChunkSizes
from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.sampling import engine
from grpo_ext.sampling.engine import ContinuousBatching
from tests.support.tiny import tiny_model
from tests.support.trainers import change, error, make
from tests.tolerances import UPDATE


def test_continuous_batching_leaves_the_weights_as_they_were():
    model = tiny_model()
    before = [(p.data_ptr(), p.dtype, p.detach().clone()) for p in model.parameters()]

    def turn(*args: Any) -> Any:
        model.to(torch.bfloat16)  # as TRL does
        raise RuntimeError("out of blocks")

    with pytest.raises(RuntimeError, match="out of blocks"):
        ContinuousBatching(turn, lambda: model).generate([Transcript(0, prompt_ids=[3])], None, ChunkSizes(1))
    for parameter, (address, dtype, values) in zip(model.parameters(), before, strict=True):
        assert (parameter.data_ptr(), parameter.dtype) == (address, dtype)
        assert torch.equal(parameter, values)


def test_a_cache_that_is_not_expected_to_fit_is_sampled_in_parts(tmp_path, monkeypatch, caplog):
    expected = change(make(tmp_path / "whole", max_steps=1, rollout_chunk_size=16))
    assert "expected to exceed" not in caplog.text
    monkeypatch.setattr(engine, "available_bytes", lambda device: 50_000)
    parts = change(make(tmp_path / "parts", max_steps=1, rollout_chunk_size=16))
    assert "generation of 16 completions at their longest is expected to exceed the free memory" in caplog.text
    assert error(expected, parts) <= UPDATE
