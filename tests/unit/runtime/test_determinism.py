"""Bitwise mode's surroundings: where weights lie in memory."""

import os

import pytest
import torch

from grpo_ext import GRPOConfig
from grpo_ext.runtime.determinism import align_memory, environment, pinned
from tests.support.tiny import tiny_model


def test_weights_move_to_aligned_memory_with_their_values_and_ties():
    model = tiny_model("gpt2")
    for parameter in model.parameters():  # 56 bytes from where torch's allocator puts them
        raw = torch.empty(parameter.numel() + 16)
        assert raw.data_ptr() % 64 == 0
        parameter.data = raw[14 : 14 + parameter.numel()].view(parameter.shape).copy_(parameter.data)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert any(p.data_ptr() % 64 for p in model.parameters())
    align_memory(model)
    assert not any(t.data_ptr() % 64 for t in [*model.parameters(), *model.buffers()])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert tied is (model.get_input_embeddings().weight is model.get_output_embeddings().weight)


def test_tf32_is_off_inside_and_as_it_was_afterwards():
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        assert environment()["float32_matmul_precision"] == "tf32"
        with pinned(1):
            assert matmul.fp32_precision == "ieee"
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(("set_before", "after"), [(None, ":4096:8"), (":16:8", ":16:8"), (":0:0", ":0:0")])
def test_bitwise_mode_chooses_the_workspace_of_cublas_and_turns_tf32_off(monkeypatch, tmp_path, set_before, after):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored afterwards
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    if set_before is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = set_before
    assert GRPOConfig(str(tmp_path), use_cpu=True).tf32 is None
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == set_before, "outside bitwise mode nothing is set"
    assert GRPOConfig(str(tmp_path), use_cpu=True, bitwise_invariant=True).tf32 is False
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == after
