"""The loss scale against DeepSpeed's scaler, and where it ends."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest

from grpo_ext.errors import PrecisionError
from grpo_ext.precision.loss_scaler import LossScaler


def scaler_of(value: float, **options: Any) -> LossScaler:
    scaler = LossScaler(bool)
    vars(scaler).update(options, value=value, patience=options.get("hysteresis", 2))
    return scaler


def test_it_never_falls_below_the_minimum():
    scaler = scaler_of(4.0, hysteresis=1, minimum=3.0)
    scaler.move(True)
    assert scaler.value == 3.0
    with pytest.raises(PrecisionError, match=r"loss scale of 3, its minimum; 2 of 2 steps were skipped"):
        scaler.move(True)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_deepspeeds(seed, monkeypatch):
    scaler = pytest.importorskip(
        "deepspeed.runtime.fp16.loss_scaler", reason="the oracle is DeepSpeed's own class (pip install deepspeed)"
    )
    monkeypatch.setattr(scaler, "dist", mock.MagicMock(get_rank=lambda: 1))  # it asks who may print
    rng = random.Random(seed)
    window, hysteresis, minimum = rng.choice([1, 2, 5, 20]), rng.choice([1, 2, 4]), rng.choice([1, 8, 24])
    ours = scaler_of(2.0**10, window=window, hysteresis=hysteresis, minimum=float(minimum))
    theirs = scaler.DynamicLossScaler(
        init_scale=2.0**10,
        scale_window=window,
        min_scale=minimum,
        delayed_shift=hysteresis,
        consecutive_hysteresis=False,
    )
    share = rng.choice([0.05, 0.3, 0.6])
    for _ in range(300):
        overflow = rng.random() < share
        ended = {deepspeed_failed(theirs, overflow), ours_failed(ours, overflow)}
        if ended == {True}:
            return
        assert ended == {False}
        assert ours.value == theirs.cur_scale
        assert ours.patience == theirs.cur_hysteresis


def deepspeed_failed(scaler: Any, overflow: bool) -> bool:
    """DeepSpeed raises a bare Exception at the minimum."""
    try:
        scaler.update_scale(overflow)
    except Exception as error:
        if "already at minimum" not in str(error):
            raise
        return True
    return False


def ours_failed(scaler: LossScaler, overflow: bool) -> bool:
    try:
        scaler.move(overflow)
    except PrecisionError:
        return True
    return False
