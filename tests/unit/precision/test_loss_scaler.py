"""The scaler that Accelerate drives: scaling and skipping, and its scale against DeepSpeed's."""

import random
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_ext.checks.model import check_half_weights
from grpo_ext.errors import ModelError, PrecisionError
from grpo_ext.precision import loss_scaler
from grpo_ext.precision.loss_scaler import LossScaler


def scaler_of(value: float, hysteresis: int = 1, **settings: Any) -> LossScaler:
    scaler = LossScaler(torch.device("cpu"))
    scaler.value = value
    vars(scaler).update(settings, hysteresis=hysteresis, patience=hysteresis)
    return scaler


def setup(fused: bool = False):
    weights = [torch.nn.Parameter(torch.full((3,), 2.0)), torch.nn.Parameter(torch.ones(2))]
    return weights, torch.optim.AdamW(weights, lr=0.1, fused=fused), scaler_of(8.0)


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


def test_an_overflow_elsewhere_skips_the_step_here(monkeypatch):
    monkeypatch.setattr(loss_scaler, "any_process", lambda overflow: True)
    weights, optimizer, scaler = setup()
    backward(scaler, weights)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights[0].detach(), torch.full((3,), 2.0))
    assert scaler.value == 4.0


# ---- The scale ------------------------------------------------------------------------------------------------------


def test_it_stays_within_the_range_of_float32():
    scaler = scaler_of(2.0**126, window=1)
    for _ in range(4):
        scaler.move(False)
    assert scaler.value == 2.0**127


def test_it_never_falls_below_the_minimum():
    scaler = scaler_of(4.0, minimum=3.0)
    scaler.move(True)
    assert scaler.value == 3.0
    with pytest.raises(PrecisionError, match=r"loss scale of 3, its minimum; 2 of 2 steps were skipped"):
        scaler.move(True)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_deepspeeds(seed, monkeypatch):
    deepspeed = pytest.importorskip(
        "deepspeed.runtime.fp16.loss_scaler", reason="the oracle is DeepSpeed's own class (pip install deepspeed)"
    )
    monkeypatch.setattr(deepspeed, "dist", mock.MagicMock(get_rank=lambda: 1))  # it asks who may print
    rng = random.Random(seed)
    window, hysteresis, minimum = rng.choice([1, 2, 5, 20]), rng.choice([1, 2, 4]), rng.choice([1, 8, 24])
    ours = scaler_of(2.0**10, hysteresis=hysteresis, window=window, minimum=float(minimum))
    settings = {"delayed_shift": hysteresis, "consecutive_hysteresis": False}
    theirs = deepspeed.DynamicLossScaler(init_scale=2.0**10, scale_window=window, min_scale=minimum, **settings)
    share = rng.choice([0.05, 0.3, 0.6])
    for _ in range(100):  # within the range of float32, which bounds ours
        overflow = rng.random() < share
        try:
            ours.move(overflow)
        except PrecisionError:
            with pytest.raises(Exception, match="already at minimum"):
                theirs.update_scale(overflow)
            return
        theirs.update_scale(overflow)
        assert ours.value == theirs.cur_scale
        assert ours.patience == theirs.cur_hysteresis


def test_trained_weights_in_bfloat16_are_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"is bfloat16.*load the model with dtype='float32'"):
        check_half_weights(model.bfloat16(), fp16=True)
    check_half_weights(model.float(), fp16=True)
    for parameter in model.half().parameters():
        parameter.requires_grad = False
    check_half_weights(model, fp16=True)
