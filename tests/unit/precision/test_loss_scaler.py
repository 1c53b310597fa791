"""The scaler that Accelerate drives: scaling, skipping and state."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.checks.model import check_half_weights
from grpo_ext.errors import ConfigError, ModelError
from grpo_ext.precision.loss_scaler import (
    LossScaler,
    install_loss_scaler,
    reduce_in_float32,
)


def setup(fused: bool = False, anyone: Any = bool, **options: Any):
    weights = [torch.nn.Parameter(torch.full((3,), 2.0)), torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=fused)
    scaler = LossScaler(anyone)
    vars(scaler).update(value=8.0, patience=options.setdefault("hysteresis", 1), **options)
    return weights, optimizer, scaler


def backward(scaler: LossScaler, weights: list[torch.nn.Parameter], factor: float = 1.0) -> None:
    scaler.scale(sum((w * factor).sum() for w in weights)).backward()


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_once_and_the_step_is_taken(fused):
    weights, optimizer, scaler = setup(fused)
    backward(scaler, weights)
    assert weights[0].grad is not None
    assert weights[0].grad.tolist() == [8.0] * 3
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)  # clipping has done it already
    assert weights[0].grad.tolist() == [1.0] * 3
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(weights[0].detach(), torch.full((3,), 2.0))
    assert scaler.value == 8.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflows_is_not_taken(fused):
    weights, optimizer, scaler = setup(fused)
    called = []
    inner = optimizer.step
    optimizer.step = lambda *args, **kwargs: (called.append(1), inner(*args, **kwargs))[1]
    backward(scaler, weights, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert called == []  # Accelerate tells a skipped step by this, and keeps the scheduler where it is
    assert torch.equal(weights[0].detach(), torch.full((3,), 2.0))
    assert scaler.value == 4.0
    optimizer.zero_grad()
    backward(scaler, weights)
    scaler.step(optimizer)
    scaler.update()
    assert called == [1]
    assert scaler.report() == {"fp16/loss_scale": 4.0, "fp16/overflows": 1.0, "fp16/skipped_steps": 1.0}
    assert scaler.report()["fp16/overflows"] == 0.0


def test_an_overflow_elsewhere_skips_the_step_here():
    weights, optimizer, scaler = setup(anyone=lambda found: True)
    backward(scaler, weights)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights[0].detach(), torch.full((3,), 2.0))
    assert scaler.value == 4.0


def test_its_state_is_plain_numbers_and_comes_back():
    weights, optimizer, scaler = setup(hysteresis=2, window=3)
    for factor in (1.0, float("inf"), 1.0):
        backward(scaler, weights, factor)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = json.loads(json.dumps(scaler.state_dict()))
    again = LossScaler(bool)
    again.load_state_dict(state)
    assert again.state_dict() == scaler.state_dict()
    assert again.report()["fp16/overflows"] == 0.0  # they were reported before
    other = LossScaler(bool)
    other.load_state_dict(torch.amp.GradScaler("cpu", init_scale=4.0).state_dict())
    assert other.value == 4.0


def test_without_an_accelerator_fp16_is_refused():
    accelerator = SimpleNamespace(
        state=SimpleNamespace(), device=torch.device("cpu"), mixed_precision="fp16", native_amp=False
    )
    with pytest.raises(ConfigError, match="needs an accelerator: on cpu Accelerate computes in float32"):
        install_loss_scaler(accelerator)


def test_weights_in_half_precision_are_refused():
    model = torch.nn.Linear(2, 2).half()
    with pytest.raises(ModelError, match=r"weight \(one of 2\) is float16"):
        check_half_weights(model, fp16=True)
    with pytest.raises(ModelError, match=r"is bfloat16.*quantised model: float32_adapters=True"):
        check_half_weights(model.bfloat16(), fp16=True)
    check_half_weights(model.float(), fp16=True)
    for parameter in model.half().parameters():
        parameter.requires_grad = False
    check_half_weights(model, fp16=True)


def test_fsdp2_adds_gradients_up_in_float32():
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plugin = SimpleNamespace(fsdp_version=2, mixed_precision_policy=policy)
    reduce_in_float32(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    assert plugin.mixed_precision_policy.reduce_dtype == torch.float32
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    reduce_in_float32(SimpleNamespace(state=SimpleNamespace()))  # no FSDP: nothing to do
