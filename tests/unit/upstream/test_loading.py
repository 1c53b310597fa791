"""Every weight of a checkpoint comes back, under whatever name its file has it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import load_sharded_checkpoint

from grpo_ext.errors import CheckpointError
from grpo_ext.upstream.loading import load_renamed
from tests.support.architectures import PREFIXED, architecture
from tests.support.images import FAMILIES, image_model


def model(kind: str, seed: int) -> Any:
    return image_model(kind, seed) if kind in FAMILIES else architecture(kind, seed)


def load(model: Any, folder: Path) -> None:
    """As transformers' Trainer does, and what that leaves out."""
    if (file := folder / "model.safetensors").is_file():
        result = model.load_state_dict(load_file(file), strict=False)
    elif (file := folder / "pytorch_model.bin").is_file():
        result = model.load_state_dict(torch.load(file), strict=False)
    else:
        result = load_sharded_checkpoint(model, str(folder), strict=False)
    load_renamed(model, folder, result.missing_keys)


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("shard", ["20KB", pytest.param("1GB", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [*PREFIXED, *FAMILIES])
def test_every_architecture_loads_its_own_checkpoint(tmp_path, kind, shard):
    saved, loaded = model(kind, 0), model(kind, 1)
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert not same(saved, loaded)
    load(loaded, tmp_path)
    assert same(saved, loaded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_no_digit_is_lost(tmp_path, dtype):
    saved, loaded = (model("qwen3_next", seed).to(dtype) for seed in (0, 1))
    saved.save_pretrained(tmp_path)
    load(loaded, tmp_path)
    assert same(saved, loaded)
    assert {value.dtype for value in loaded.state_dict().values()} == {dtype}


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_missing_weight_is_an_error(tmp_path, kind, file):
    saved = model(kind, 0)
    saved.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[next(name for name in weights if "up_proj" in name)]
    (tmp_path / "model.safetensors").unlink()
    if file.endswith(".bin"):
        torch.save(weights, tmp_path / file)
    else:
        save_file(weights, tmp_path / file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks .*up_proj"):
        load(saved, tmp_path)


def test_a_model_that_no_class_reads_back_is_refused(tmp_path):
    model("llama", 0).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="lacks weight, bias, and its class cannot read them"):
        load(torch.nn.Linear(2, 2), tmp_path)
