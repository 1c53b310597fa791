"""The loss scale against DeepSpeed's scaler, against torch's where the two agree, and by hand."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_ext.errors import PrecisionError
from grpo_ext.precision.scale_rule import LossScale, ScaleRule, after_step, start


def run(overflows: list[bool], scale: float, rule: ScaleRule) -> list[LossScale]:
    states = [start(scale, rule)]
    for overflow in overflows:
        states.append(after_step(states[-1], overflow, rule))
    return states


def scales(overflows: str, scale: float = 64.0, **rule) -> list[float]:
    return [state.scale for state in run([c == "x" for c in overflows], scale, ScaleRule(**rule))]


def test_by_hand():
    # doubles with the clean step after two clean ones; the first overflow is tolerated, the second halves
    assert scales("....", window=2) == [64, 64, 64, 128, 128]
    assert scales("x", window=9) == [64, 64]
    assert scales("xx", window=9) == [64, 64, 32]
    assert scales("xxx", window=9) == [64, 64, 32, 16]  # patience comes back with the next doubling only
    assert scales("x.x", window=9) == [64, 64, 64, 32]
    assert scales("x...xx", window=2) == [64, 64, 64, 64, 128, 128, 64]
    assert scales("x", hysteresis=1) == [64, 32]


def test_it_never_falls_below_the_minimum():
    states = run([True], 3.0, ScaleRule(hysteresis=1, minimum=2.0))
    assert states[-1].scale == 2.0
    with pytest.raises(PrecisionError, match=r"loss scale of 2, which is at its minimum .* 2 of 2 steps were skipped"):
        after_step(states[-1], True, ScaleRule(hysteresis=1, minimum=2.0))


def test_a_scale_that_never_fits_ends_in_an_error_and_no_endless_loop():
    states = run([True] * 17, 65536.0, ScaleRule())  # one is tolerated, sixteen halve it to 1
    assert states[-1].skipped == 17
    assert states[-1].scale == 1.0
    with pytest.raises(PrecisionError, match="lower learning_rate"):
        after_step(states[-1], True, ScaleRule())


def test_a_fixed_scale_stays_and_tolerates_what_the_hysteresis_says():
    rule = ScaleRule(hysteresis=3, dynamic=False)
    states = run([False] * 5000 + [True, True, False, True, True], 128.0, rule)
    assert {state.scale for state in states} == {128.0}
    assert states[-1].skipped == 4
    with pytest.raises(PrecisionError, match="which is fixed"):
        after_step(states[-1], True, rule)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_deepspeeds(seed, monkeypatch):
    scaler = pytest.importorskip(
        "deepspeed.runtime.fp16.loss_scaler", reason="the oracle is DeepSpeed's own class (pip install deepspeed)"
    )
    monkeypatch.setattr(scaler, "dist", mock.MagicMock(get_rank=lambda: 1))  # it asks who may print
    rng = random.Random(seed)
    rule = ScaleRule(
        window=rng.choice([1, 2, 5, 20]), hysteresis=rng.choice([1, 2, 4]), minimum=rng.choice([0.25, 1, 8])
    )
    theirs = scaler.DynamicLossScaler(
        init_scale=2.0**10,
        scale_window=rule.window,
        min_scale=rule.minimum,
        delayed_shift=rule.hysteresis,
        consecutive_hysteresis=False,
    )
    state = start(2.0**10, rule)
    share = rng.choice([0.05, 0.3, 0.6])
    for _ in range(300):
        overflow = rng.random() < share
        ended = {scaler_failed(theirs, overflow), ours_failed(state, overflow, rule)}
        if ended == {True}:
            return
        assert ended == {False}
        state = after_step(state, overflow, rule)
        assert state.scale == theirs.cur_scale
        assert state.patience == theirs.cur_hysteresis


def scaler_failed(scaler: Any, overflow: bool) -> bool:
    """DeepSpeed raises a bare Exception at the minimum."""
    try:
        scaler.update_scale(overflow)
    except Exception as error:
        if "already at minimum" not in str(error):
            raise
        return True
    return False


def ours_failed(state: LossScale, overflow: bool, rule: ScaleRule) -> bool:
    try:
        after_step(state, overflow, rule)
    except PrecisionError:
        return True
    return False


def torchs(overflows: list[bool], window: int) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=window)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    found = [2.0**10]
    for overflow in overflows:
        scaler.scale(weight.sum() * (float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found


def test_where_they_agree_it_is_torchs():
    rng = random.Random(0)
    overflows = [rng.random() < 0.2 for _ in range(100)]
    rule = ScaleRule(window=10**6, hysteresis=1, minimum=2.0**-100)
    assert [state.scale for state in run(overflows, 2.0**10, rule)] == torchs(overflows, 10**6)


def test_like_deepspeeds_it_doubles_a_step_after_torchs():
    ours = [state.scale for state in run([False] * 7, 2.0**10, ScaleRule(window=6))]
    assert ours[7] == torchs([False] * 6, 6)[6] == 2.0**11
    assert ours[6] == 2.0**10
