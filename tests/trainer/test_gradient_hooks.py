"""A user's hooks on gradients run once, on the gradient of the step, whatever the micro-batches."""

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from grpo_ext.step.gradients import NativeGradients, refuse_gradient_hooks
from tests.support.tiny import tiny_model
from tests.support.trainers import change, error, make, native_fp16, on, parameters
from tests.tolerances import DIFFERENT, UPDATE

SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 2}
Hook = Callable[[torch.Tensor], torch.Tensor | None]


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def in_place(gradient: torch.Tensor) -> None:
    gradient.clamp_(-1e-3, 1e-3)


def hooked(folder: Any, *hooks: Any, late: str | None = None, **settings: Any) -> GRPOTrainer:
    """A trainer with hooks on every weight: made for a parameter where a hook takes one, `late` at an event."""
    trainer = make(folder, **{**SGD, **settings})

    def register(state: Any = None) -> None:
        for parameter in trainer.model.parameters():
            for hook in hooks:
                parameter.register_hook(hook)

    if late is None:
        register()
    else:
        trainer.add_callback(on(late, register))
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The update without a hook."""
    return change(make(tmp_path_factory.mktemp("plain"), **SGD))


@pytest.mark.parametrize(
    ("hook", "settings"),
    [
        pytest.param(clamp, {}, marks=pytest.mark.full),
        pytest.param(clamp, {"late": "on_train_begin"}, marks=pytest.mark.full),
        pytest.param(clamp, {"bitwise_invariant": True}, marks=pytest.mark.full),
        pytest.param(in_place, {}, marks=pytest.mark.full),
        (in_place, {"late": "on_train_begin"}),
        pytest.param(in_place, {"bitwise_invariant": True}, marks=pytest.mark.full),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_hook_that_is_not_linear_gives_the_same_update_for_every_micro_batch_size(tmp_path, plain, hook, settings):
    whole, parts = (
        change(hooked(tmp_path / str(size), hook, per_device_train_batch_size=size, **settings)) for size in (16, 3)
    )
    assert error(whole, parts) < UPDATE
    assert error(plain, whole) > DIFFERENT
    assert 0 < float(whole.abs().max()) < 2.001 * SGD["learning_rate"] * 1e-3


def test_a_hook_that_adds_decay_does_so_once(tmp_path):
    trainer = make(tmp_path / "hooked", **{**SGD, "max_steps": 1}, per_device_train_batch_size=3)
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient, parameter=parameter: gradient + 0.1 * parameter)
    decayed = make(tmp_path / "decayed", **{**SGD, "max_steps": 1}, per_device_train_batch_size=3)
    optimizer = torch.optim.SGD(decayed.model.parameters(), lr=SGD["learning_rate"], weight_decay=0.1)
    decayed.optimizer = optimizer
    assert error(change(decayed), change(trainer)) < UPDATE


def test_a_hook_that_runs_in_every_micro_batch_depends_on_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr(NativeGradients, "backward", lambda self, run, contributes: run())
    monkeypatch.setattr(NativeGradients, "run_hooks", lambda self: None)
    whole, parts = (change(hooked(tmp_path / str(size), clamp, per_device_train_batch_size=size)) for size in (16, 3))
    assert error(whole, parts) > DIFFERENT


def test_linear_hooks_scale_and_mask(tmp_path):
    plain = change(make(tmp_path / "plain", **SGD | {"max_steps": 1}))
    halved = change(hooked(tmp_path / "halved", lambda gradient: 0.5 * gradient, max_steps=1))
    assert error(0.5 * plain, halved) < UPDATE
    mask = (torch.arange(len(plain)) % 2).float()
    trainer, start = make(tmp_path / "masked", **SGD | {"max_steps": 1}), 0
    for parameter in trainer.model.parameters():
        part = mask[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
        parameter.register_hook(lambda gradient, part=part: gradient * part)
    assert torch.equal(plain * mask, change(trainer))


def test_hooks_run_once_in_their_order_and_can_be_removed(tmp_path):
    calls: list[str] = []
    trainer = make(tmp_path, **{**SGD, "per_device_train_batch_size": 3, "max_steps": 3})
    weight = trainer.model.model.norm.weight
    weight.register_hook(lambda gradient: calls.append("first"))
    second = weight.register_hook(lambda gradient: calls.append("second"))
    trainer.add_callback(on("on_step_end", lambda state: second.remove(), at=2))
    trainer.train()
    assert calls == ["first", "second"] * 2 + ["first"]
    weight.sum().backward()
    assert calls[5:] == ["first"]


class RegistersInItsLoss(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        if not self.model.model.norm.weight._backward_hooks:
            for parameter in self.model.parameters():
                parameter.register_hook(clamp)
        return super()._compute_loss(model, inputs)


def test_hooks_that_a_loss_registers_run_once_too(tmp_path):
    expected = change(hooked(tmp_path / "before", clamp))
    own = change(make(tmp_path / "own", cls=RegistersInItsLoss, per_device_train_batch_size=3, **SGD))
    assert error(expected, own) < UPDATE


def test_what_a_hook_returns_may_be_a_tensor_that_it_keeps(tmp_path):
    """Clipping and the optimizer write to the gradient, not to the user's tensor."""
    mean: dict[int, torch.Tensor] = {}

    def averaged(gradient: torch.Tensor) -> torch.Tensor:
        kept = mean.setdefault(gradient.numel(), torch.zeros_like(gradient))
        return kept.add_(gradient)

    trainer = make(tmp_path, **{**SGD, "max_grad_norm": 1e-3, "max_steps": 1})
    trainer.model.model.embed_tokens.weight.register_hook(averaged)
    trainer.train()
    assert float(next(iter(mean.values())).norm()) > 2e-3


def test_in_fp16_a_hook_has_the_gradient_without_the_loss_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate.Accelerator, "__init__", native_fp16(accelerate.Accelerator.__init__))

    def update(scale: float) -> torch.Tensor:
        trainer = hooked(tmp_path / str(scale), clamp, fp16=True, max_steps=1)
        trainer.accelerator.scaler.value = scale
        return change(trainer)

    small = update(256.0)
    assert 0 < float(small.abs().max()) < 1.001 * SGD["learning_rate"] * 1e-3
    assert error(small, update(1024.0)) < 0.02  # float16's rounding


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_for_several_gradients_is_refused(tmp_path, mode):
    trainer = make(tmp_path, **SGD)
    torch.autograd.graph.register_multi_grad_hook([*trainer.model.parameters()], lambda *_: None, mode=mode)
    with pytest.raises(ConfigError, match=r"a hook on the gradient of .* would run during the backward pass"):
        trainer.train()


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin"])
def test_a_hook_after_accumulation_is_refused_whenever_it_comes(tmp_path, event):
    trainer = make(tmp_path, **SGD)
    weight = trainer.model.model.norm.weight

    def register(state: Any) -> None:
        weight.register_post_accumulate_grad_hook(lambda parameter: parameter.data.sub_(0.1 * parameter.grad))

    trainer.add_callback(on(event, register))
    before = parameters(trainer)
    with pytest.raises(ConfigError, match=r"gradient of model.norm.weight would run during the backward pass"):
        trainer.train()
    assert torch.equal(parameters(trainer), before)


def test_engines_that_reduce_by_themselves_refuse_hooks_by_name():
    model = tiny_model()
    refuse_gradient_hooks(model, sharded=True)
    model.model.norm.weight.register_hook(clamp)
    refuse_gradient_hooks(model, sharded=False)
    with pytest.raises(ConfigError, match=r"gradient of model.norm.weight .* train with DDP"):
        refuse_gradient_hooks(model, sharded=True)
