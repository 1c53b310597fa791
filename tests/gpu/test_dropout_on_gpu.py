"""On a GPU: dropout drops what it drops on a CPU, by the Triton kernel and by operators of torch, and what it costs."""

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig

from grpo_ext.algorithms.keyed_random import token_keys
from grpo_ext.forward import dropout
from tests.support.gpu import DEVICE, TOY, needs_gpu
from tests.support.trainers import LORA, error, update
from tests.tolerances import DIFFERENT

pytestmark = [pytest.mark.gpu, needs_gpu]
TOKENS, CHANNELS = (33, 96) if TOY else (8192, 4096)
KERNELS = 1e-3  # between micro-batches: a GPU chooses its kernels, TF32 among them, by the shapes of products
KEYS_N = token_keys(7, [0, 0, 1], [0, 1, 2], [TOKENS // 6] * 3, [TOKENS // 6] * 3)
MODULE = dropout._module_key("layers.0.q_proj.lora_dropout.default", 0)
KINDS = {"kernel": lambda: dropout._kernel, "operators": lambda: lambda: None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_a_gpu_drops_the_numbers_that_a_cpu_drops(monkeypatch, kind, dtype, rate):
    monkeypatch.setattr(dropout, "_kernel", KINDS[kind]())
    values = torch.randn(len(KEYS_N), CHANNELS, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = values.to(DEVICE).requires_grad_()
    output = dropout._Masked.apply(there, KEYS_N.to(DEVICE), MODULE, rate)
    output.backward(torch.ones_like(output))
    assert torch.equal(output.detach().cpu(), dropout._Masked.apply(values, KEYS_N, MODULE, rate))
    assert there.grad is not None
    assert torch.equal(there.grad.cpu(), dropout._Masked.apply(torch.ones_like(values), KEYS_N, MODULE, rate))


def median_ms(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3 if TOY else 20):
        start = time.perf_counter()
        run()
        if not TOY:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def test_seconds_of_a_mask_beside_torchs(record_property):
    values, keys_N = torch.randn(len(KEYS_N), CHANNELS, device=DEVICE, requires_grad=True), KEYS_N.to(DEVICE)
    runs = {
        "keyed": lambda: dropout._Masked.apply(values, keys_N, MODULE, 0.05).sum().backward(),
        "torch": lambda: torch.nn.functional.dropout(values, 0.05).sum().backward(),
    }
    for name, run in runs.items():
        run()  # compiles the kernel
        record_property(f"{name}, forward and backward, ms", median_ms(run))


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_lora_step_with_dropout_has_one_update(record_property, tmp_path, bitwise):
    def learned(size: int, rate: float) -> torch.Tensor:
        config = LoraConfig(**LORA, lora_dropout=rate, init_lora_weights=False)
        settings = {"max_steps": 2, "bitwise_invariant": bitwise, "use_cpu": TOY, "peft_config": config}
        return update(tmp_path / f"{size}-{rate}", per_device_train_batch_size=size, **settings)[0]

    whole, parts = learned(16, 0.1), learned(3, 0.1)
    record_property("between micro-batches", error(whole, parts))
    assert torch.equal(whole, parts) if bitwise else error(whole, parts) <= KERNELS
    assert error(learned(16, 0.2), whole) > DIFFERENT
