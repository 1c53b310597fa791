"""Bitwise mode's surroundings: where weights lie in memory."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

from grpo_ext.runtime.determinism import align_memory
from tests.support.tiny import tiny_model


def shifted(model: torch.nn.Module, shift: int) -> torch.nn.Module:
    """`model` with weights that lie `shift` bytes from where torch's allocator puts them."""
    for parameter in model.parameters():
        raw = torch.empty(parameter.numel() * 4 + 64, dtype=torch.uint8)
        assert raw.data_ptr() % 64 == 0
        moved = raw[shift : shift + parameter.numel() * 4].view(torch.float32).view(parameter.shape)
        parameter.data = moved.copy_(parameter.data)
    return model


def test_weights_move_to_aligned_memory_with_their_values_and_ties():
    model = shifted(tiny_model("gpt2"), 56)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert any(p.data_ptr() % 64 for p in model.parameters())
    align_memory(model)
    assert not any(t.data_ptr() % 64 for t in [*model.parameters(), *model.buffers()])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert tied is (model.get_input_embeddings().weight is model.get_output_embeddings().weight)


def test_a_mapped_file_puts_weights_anywhere(tmp_path):
    # why it is needed: the length of a file's header decides
    places = set()
    for name in ("a", "ab", "abcdefghijk", "abcdefghijklmnopqrstuvwxyz"):
        save_file({name: torch.ones(8)}, tmp_path / name, metadata={"pad": name})
        places.add(load_file(tmp_path / name)[name].data_ptr() % 64)
    assert places != {0}
