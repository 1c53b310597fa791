"""The scaler that Accelerate drives: scaling, skipping and state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.checks.model import check_half_weights
from grpo_ext.errors import ModelError
from grpo_ext.precision.loss_scaler import LossScaler, reduce_in_float32


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


def test_an_overflow_elsewhere_skips_the_step_here():
    weights, optimizer, scaler = setup(anyone=lambda found: True)
    backward(scaler, weights)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights[0].detach(), torch.full((3,), 2.0))
    assert scaler.value == 4.0


def test_trained_weights_in_bfloat16_are_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"is bfloat16.*load the model with dtype='float32'"):
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
