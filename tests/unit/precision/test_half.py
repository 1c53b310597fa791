"""Sampling in half precision: what autocast computes, on weights that are cast once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_ext.precision.half import half_weights
from tests.support.architectures import architecture
from tests.support.tiny import tiny_model
from tests.support.trainers import LORA, make, update

KINDS = ("qwen2", "gpt2", "moe", "lora", "dora", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2")
READ_ELSEWHERE = ("dora", "falcon_h1")  # weights that more reads than autocast's products: rounded, like the products
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [9, 3, 4, 5, 5, 6, 20, 21, 22, 23]])


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind in ("lora", "dora"):
        adapter = LoraConfig(**LORA, init_lora_weights=False, use_dora=kind == "dora")
        return get_peft_model(tiny_model(), adapter).eval()
    return (tiny_model(kind) if kind in ("qwen2", "gpt2", "moe") else architecture(kind)).eval()


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


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
    with autocast(), WeightCasts(linear) as each_time:
        expected = model(IDS).logits
    with autocast(), half_weights(model, torch.bfloat16), WeightCasts(linear) as once:
        logits = model(IDS).logits
    rounding = float((expected.float() - exact).abs().max())
    difference = float((logits.float() - expected.float()).abs().max())
    print(f"{kind}: {difference:.2g}, rounding {rounding:.2g}")
    assert difference <= (rounding if kind in READ_ELSEWHERE else 0.0)
    assert rounding > 0.0
    assert each_time.count >= len(linear) * (kind not in ("gpt2", "dora"))
    assert once.count == 0
    assert torch.equal(model(IDS).logits, exact)


def weights(model: Any) -> list[tuple[str, int, torch.Tensor]]:
    named = model.named_parameters(remove_duplicate=False)
    return [(name, id(parameter), parameter.detach().clone()) for name, parameter in named]


@pytest.mark.parametrize("fails", [False, True])
def test_the_weights_are_put_back(fails):
    model = tiny_model(tie_word_embeddings=True)
    before, buffers = weights(model), {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with half_weights(model, torch.float16):
            assert model.lm_head.weight.dtype == torch.float16
            assert model.get_input_embeddings().weight.dtype == torch.float32
            assert {buffer.dtype for buffer in model.buffers()} == {buffer.dtype for buffer in buffers.values()}
            if fails:
                raise RuntimeError("while sampling")
    except RuntimeError:
        assert fails
    after = weights(model)
    assert [one[:2] for one in after] == [one[:2] for one in before]
    assert all(torch.equal(one[2], other[2]) for one, other in zip(after, before))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_a_layer_whose_forward_was_replaced_keeps_its_weights():
    model = tiny_model()  # as cast_lm_head_to_fp32 replaces that of the head
    model.lm_head.forward = model.lm_head.forward
    with half_weights(model, torch.bfloat16):
        assert model.lm_head.weight.dtype == torch.float32
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


# ---- Sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("bf16", [True, False])
def test_an_adapter_samples_in_the_precision_of_training(tmp_path, bf16, lag):
    trainer = make(tmp_path, peft_config=LoraConfig(**LORA), bf16=bf16, rollout_lag=lag, max_steps=2)
    start = [id(parameter) for parameter in trainer.model.parameters()]
    kinds = set()
    engine = trainer._rollouts.worker.engine
    inner = type(engine)._sample

    def noted(self: Any, model: Any, *args: Any) -> Any:
        layer = model.get_base_model().model.layers[0].self_attn.q_proj
        kinds.add((layer.base_layer.weight.dtype, layer.lora_A["default"].weight.dtype))
        return inner(self, model, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine), "_sample", noted)
        trainer.train()
    assert kinds == {(torch.bfloat16 if bf16 else torch.float32,) * 2}
    assert [id(parameter) for parameter in trainer.model.parameters()] == start
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_a_bitwise_run_with_an_adapter_keeps_its_bits_across_splits(tmp_path):
    settings = {"peft_config": LoraConfig(**LORA), "bf16": True, "bitwise_invariant": True, "max_steps": 2}
    settings |= {"canonical_unit_size": 3, "rollout_chunk_size": 8}
    changes = [update(tmp_path / str(size), per_device_train_batch_size=size, **settings)[0] for size in (16, 5)]
    assert float(changes[0].abs().max()) > 0
    assert torch.equal(*changes)
    other, _ = update(tmp_path / "plain", per_device_train_batch_size=5, **(settings | {"bitwise_invariant": False}))
    assert not torch.equal(other, changes[0])
