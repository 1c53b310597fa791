"""Sampling in half precision: what autocast computes, on weights that are cast once."""

import contextlib
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_ext.precision.half import half_weights
from tests.support.architectures import architecture
from tests.support.tiny import TINY, tiny_model
from tests.support.trainers import LORA, update
from tests.support.vllm_weights import adapted

KINDS = ("qwen2", "gpt2", "moe", "lora", "dora", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2")
READ_ELSEWHERE = ("dora", "falcon_h1")  # weights that more reads than autocast's products: rounded, like the products
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [9, 3, 4, 5, 5, 6, 20, 21, 22, 23]])


def model_of(kind: str) -> Any:
    builder = adapted if kind in ("lora", "dora") else tiny_model if kind in TINY else architecture
    return builder(kind).eval()


class WeightCasts(TorchDispatchMode):
    """Counts casts of these tensors."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.memory, self.count = {tensor.data_ptr() for tensor in tensors}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].data_ptr() in self.memory
        return func(*args, **kwargs or {})


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, pytest.param("falcon_h1", marks=pytest.mark.full)])
def test_the_model_computes_what_autocast_computes(kind):
    model = model_of(kind)
    exact = model(IDS).logits
    linear = [p for m in model.modules() if type(m) is torch.nn.Linear for p in m.parameters()]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        with WeightCasts(linear) as each_time:
            expected = model(IDS).logits
        with half_weights(model, torch.bfloat16), WeightCasts(linear) as once:
            logits = model(IDS).logits
    rounding = float((expected.float() - exact).abs().max())
    difference = float((logits.float() - expected.float()).abs().max())
    print(f"{kind}: {difference:.2g}, rounding {rounding:.2g}")
    assert difference <= (rounding if kind in READ_ELSEWHERE else 0.0)
    assert rounding > 0.0
    assert each_time.count >= len(linear) * (kind not in ("gpt2", "dora"))
    assert once.count == 0
    assert torch.equal(model(IDS).logits, exact)


def test_the_weights_are_put_back_after_an_error():
    model = tiny_model(tie_word_embeddings=True)
    before = [(id(p), p.detach().clone()) for p in model.parameters()]
    buffers = {buffer.dtype for buffer in model.buffers()}

    with contextlib.suppress(RuntimeError), half_weights(model, torch.float16):
        assert model.lm_head.weight.dtype == torch.float16
        assert model.get_input_embeddings().weight.dtype == torch.float32
        assert {buffer.dtype for buffer in model.buffers()} == buffers
        raise RuntimeError("while sampling")
    for parameter, (address, value) in zip(model.parameters(), before, strict=True):
        assert id(parameter) == address
        assert torch.equal(parameter, value)
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.full
def test_a_bitwise_run_with_an_adapter_keeps_its_bits_across_splits(tmp_path):
    settings = {"peft_config": LoraConfig(**LORA), "bf16": True, "bitwise_invariant": True, "max_steps": 1}
    settings |= {"canonical_unit_size": 3, "rollout_chunk_size": 8}
    changes = [update(tmp_path / str(size), per_device_train_batch_size=size, **settings)[0] for size in (16, 5)]
    assert float(changes[0].abs().max()) > 0
    assert torch.equal(*changes)
    other, _ = update(tmp_path / "plain", per_device_train_batch_size=5, **(settings | {"bitwise_invariant": False}))
    assert not torch.equal(other, changes[0])
