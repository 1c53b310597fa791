"""The scaler that Accelerate drives: scaling and skipping, and its scale against DeepSpeed's."""

import random
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_ext.checks.model import check_half_weights
from grpo_ext.errors import ModelError, PrecisionError
from grpo_ext.precision.loss_scaler import LossScaler


def scaler_of(value: float, anyone: Any = bool, hysteresis: int = 1, **settings: Any) -> LossScaler:
    scaler = LossScaler(torch.device("cpu"), anyone)
    scaler.value = value
    vars(scaler).update(settings, hysteresis=hysteresis, patience=hysteresis)
    return scaler


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_once_and_an_overflow_elsewhere_skips_the_step_here(fused, elsewhere):
    weights = [torch.nn.Parameter(torch.full((3,), 2.0)), torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=fused)
    scaler = scaler_of(8.0, lambda overflow: overflow or elsewhere)
    scaler.scale(sum(weight.sum() for weight in weights)).backward()
    assert weights[0].grad.tolist() == [8.0] * 3
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)  # clipping has done it already
    assert weights[0].grad.tolist() == [1.0] * 3
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights[0].detach(), torch.full((3,), 2.0)) == elsewhere
    assert scaler.value == (4.0 if elsewhere else 8.0)


def test_it_stays_within_the_range_of_float32_and_never_falls_below_the_minimum():
    scaler = scaler_of(2.0**126, window=1)
    for _ in range(4):
        scaler.move(False)
    assert scaler.value == 2.0**127
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
