"""The scaler that Accelerate drives: scaling, skipping, state, and DeepSpeed's section of the same settings."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.errors import ConfigError, ModelError, PrecisionError
from grpo_ext.precision.loss_scaler import (
    DeepSpeedScale,
    LossScaler,
    deepspeed_minimum,
    fill_deepspeed,
    install_loss_scaler,
    loss_scale_options,
    reduce_in_float32,
    refuse_half_weights,
)


def scaler_of(anyone: Any = bool, **options: Any) -> LossScaler:
    return LossScaler(loss_scale_options(options), anyone)


def setup(fused: bool = False, anyone: Any = bool, **options: Any):
    weights = [torch.nn.Parameter(torch.full((3,), 2.0)), torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=fused)
    return weights, optimizer, scaler_of(anyone, initial_scale_power=3, **{"hysteresis": 1, **options})


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
    assert scaler.get_scale() == 8.0


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
    assert scaler.get_scale() == 4.0
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
    assert scaler.get_scale() == 4.0


def test_its_state_is_plain_numbers_and_comes_back():
    weights, optimizer, scaler = setup(hysteresis=2, loss_scale_window=3)
    for factor in (1.0, float("inf"), 1.0):
        backward(scaler, weights, factor)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = json.loads(json.dumps(scaler.state_dict()))
    again = scaler_of(loss_scale_window=3)
    again.load_state_dict(state)
    assert again.state_dict() == scaler.state_dict()
    assert again.report()["fp16/overflows"] == 0.0  # they were reported before
    other = scaler_of()
    other.load_state_dict(torch.amp.GradScaler("cpu", init_scale=4.0).state_dict())
    assert other.get_scale() == 4.0


def test_without_an_accelerator_fp16_is_refused():
    accelerator = SimpleNamespace(
        state=SimpleNamespace(), device=torch.device("cpu"), mixed_precision="fp16", native_amp=False
    )
    with pytest.raises(ConfigError, match="needs an accelerator: on cpu Accelerate computes in float32"):
        install_loss_scaler(accelerator, {})


def test_weights_in_half_precision_are_refused():
    model = torch.nn.Linear(2, 2).half()
    with pytest.raises(ModelError, match=r"weight \(one of 2\) is float16"):
        refuse_half_weights(model)
    with pytest.raises(ModelError, match=r"is bfloat16.*quantised model: float32_adapters=True"):
        refuse_half_weights(model.bfloat16())
    refuse_half_weights(model.float())
    for parameter in model.half().parameters():
        parameter.requires_grad = False
    refuse_half_weights(model)


# ---- DeepSpeed ------------------------------------------------------------------------------------------------------


def test_the_settings_fill_deepspeeds_section():
    section: dict[str, Any] = {"enabled": "auto", "loss_scale": "auto", "hysteresis": 4}
    fill_deepspeed(section, {"initial_scale_power": 10, "loss_scale_window": 50, "min_loss_scale": 2})
    assert section == {
        "enabled": "auto",
        "loss_scale": 0,
        "initial_scale_power": 10,
        "loss_scale_window": 50,
        "hysteresis": 4,  # the file's, as nothing else was asked for
        "min_loss_scale": 2,
    }
    fixed: dict[str, Any] = {}
    fill_deepspeed(fixed, {"loss_scale": 100.0})
    assert fixed["loss_scale"] == 100.0


@pytest.mark.parametrize(
    ("section", "chosen", "says"),
    [
        ({"hysteresis": 4}, {"hysteresis": 2}, "hysteresis is 4 in the file and 2 in fp16_loss_scale"),
        ({"loss_scale": 0}, {"loss_scale": 8.0}, "loss_scale is 0 in the file and 8.0 in fp16_loss_scale"),
        ({"loss_scale": 128}, {"initial_scale_power": 3}, "loss_scale=128 in the file is fixed"),
    ],
)
def test_a_file_that_says_something_else_is_refused(section, chosen, says):
    with pytest.raises(ConfigError, match=says):
        fill_deepspeed(section, chosen)


def test_deepspeed_reads_the_section_as_it_is_meant():
    config = pytest.importorskip("deepspeed.runtime.precision_config", reason="needs deepspeed")
    section: dict[str, Any] = {"enabled": True}
    options = {"initial_scale_power": 10, "loss_scale_window": 50, "hysteresis": 3, "min_loss_scale": 2}
    fill_deepspeed(section, options)
    read = config.DeepSpeedFP16Config(**section)
    assert read.dynamic_loss_scale() if callable(getattr(read, "dynamic_loss_scale", None)) else read.loss_scale == 0
    assert (read.initial_scale_power, read.loss_scale_window, read.hysteresis, read.min_loss_scale) == (10, 50, 3, 2.0)


def test_deepspeeds_own_scale_is_reported_and_a_fixed_one_has_an_end():
    engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scale=512), skipped_steps=3)
    watch = DeepSpeedScale({"loss_scale": 512, "hysteresis": 2})
    assert watch.report(engine) == {"fp16/loss_scale": 512.0, "fp16/overflows": 3.0, "fp16/skipped_steps": 3.0}
    watch.after_step(engine)
    watch.after_step(engine)  # this one was taken
    engine.skipped_steps = 4
    watch.after_step(engine)
    assert watch.report(engine)["fp16/overflows"] == 1.0
    engine.skipped_steps = 5
    with pytest.raises(PrecisionError, match="fixed loss scale of 512: 2 steps in a row"):
        watch.after_step(engine)
    stage2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2", reason="needs deepspeed")
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3", reason="needs deepspeed")
    assert hasattr(stage2.DeepSpeedZeroOptimizer, "loss_scale")
    assert hasattr(stage3.DeepSpeedZeroOptimizer_Stage3, "loss_scale")


def test_deepspeeds_bare_exception_becomes_an_error_with_a_remedy():
    with pytest.raises(PrecisionError, match=r"min_loss_scale.*lower learning_rate"), deepspeed_minimum():
        raise Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
    with pytest.raises(KeyError), deepspeed_minimum():
        raise KeyError("another")
    scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler", reason="needs deepspeed")
    assert "loss scale already at minimum" in inspect.getsource(scaler.DynamicLossScaler)


def test_a_checkpoint_does_not_override_the_remedy():
    *_, scaler = setup(hysteresis=4)
    state = {**scaler.state_dict(), "scale": 65536.0, "patience": 4}
    fixed = scaler_of(loss_scale=1024.0)
    fixed.load_state_dict(state)
    assert fixed.get_scale() == 1024.0
    raised = scaler_of(hysteresis=2, initial_scale_power=20, min_loss_scale=2**20)
    raised.load_state_dict(state)
    assert raised.get_scale() == 2.0**20
    assert raised.patience == 2


def test_fsdp2_adds_gradients_up_in_float32():
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plugin = SimpleNamespace(fsdp_version=2, mixed_precision_policy=policy)
    reduce_in_float32(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    assert plugin.mixed_precision_policy.reduce_dtype == torch.float32
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    reduce_in_float32(SimpleNamespace(state=SimpleNamespace()))  # no FSDP: nothing to do
