"""Buffers that a training forward moves: refused by name where later forwards read them, else left as they are."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from grpo_ext.errors import SplitDependentError
from tests.support.selection import few_of
from tests.support.tiny import tiny_model
from tests.support.trainers import change, error, make
from tests.tolerances import DIFFERENT, UPDATE


class Around(nn.Module):
    """A module in the place of an MLP, with a buffer."""

    def __init__(self, inner: nn.Module, start: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("state", start)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.move(hidden.detach())
        return self.read(self.inner(hidden))

    def read(self, output: torch.Tensor) -> torch.Tensor:
        return output


class Ema(Around):
    """A running mean that is subtracted, replaced at each forward."""

    def move(self, hidden: torch.Tensor) -> None:
        self.state = 0.9 * self.state + 0.1 * hidden.mean((0, 1))

    def read(self, output: torch.Tensor) -> torch.Tensor:
        return output - self.state


class Gated(Ema):
    """The same behind a gate that starts at zero: only the gate's gradient reads the buffer."""

    def __init__(self, inner: nn.Module, start: torch.Tensor) -> None:
        super().__init__(inner, start)
        self.gate = nn.Parameter(torch.zeros(()))

    def read(self, output: torch.Tensor) -> torch.Tensor:
        return output + self.gate * self.state


class RunningInEvaluation(Ema):
    """As BatchNorm: while it trains only the batch counts, so the buffer is read when it samples and evaluates."""

    def read(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.training else output - self.state


class Shared(Ema):
    """Reads what the module in the layer before moves in place: both hold one buffer."""

    def move(self, hidden: torch.Tensor) -> None:
        if self.moves:
            self.state.lerp_(hidden.mean((0, 1)), 0.1)

    def read(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.moves else output - self.state


class Counter(Around):
    def move(self, hidden: torch.Tensor) -> None:
        self.state += 1


class Cache(Around):
    """Computes a table at the first forward, and as often as it is longer."""

    def move(self, hidden: torch.Tensor) -> None:
        if len(self.state) < hidden.size(-1):
            self.state = torch.arange(float(hidden.size(-1))).cos()

    def read(self, output: torch.Tensor) -> torch.Tensor:
        return output * self.state if len(self.state) > 1 else output * torch.arange(float(output.size(-1))).cos()


NORMS = (spectral_norm, parametrizations.spectral_norm)  # of a projection


def model_with(kind: Any) -> Any:
    model = tiny_model()
    layer = model.model.layers[0]
    if isinstance(kind, type):
        layer.mlp = kind(layer.mlp, torch.zeros(1 if kind in (Counter, Cache) else model.config.hidden_size))
    elif kind is not None:
        kind(layer.mlp.up_proj if kind in NORMS else layer.mlp)
    return model


def by_a_hook(layer: Any, moves: Any) -> None:
    """A user's buffer in a module of transformers, which hooks read, and move where `moves` says."""
    layer.register_buffer("mean", torch.zeros(32))

    def read(module: Any, args: Any) -> Any:
        if layer.training and moves():
            layer.mean = 0.9 * layer.mean + 0.1 * args[0].detach().mean((0, 1))
        return (args[0] - layer.mean,)

    layer.register_forward_pre_hook(read)


def in_backward(layer: Any) -> None:
    """The same, moved by the backward pass."""
    by_a_hook(layer, lambda: False)

    def move(module: Any, inputs: Any, outputs: Any) -> None:
        layer.mean = layer.mean + outputs[0].mean((0, 1)).sign()

    layer.register_full_backward_hook(move)


MOVING = {
    "parametrizations.weight.0._u": parametrizations.spectral_norm,
    "weight_u": spectral_norm,
    "layers.0.mlp.state": Ema,
    "0.mlp.state": Gated,
    "mlp.state": RunningInEvaluation,
    "layers.0.mlp.mean": lambda layer: by_a_hook(layer, lambda: True),
    "0.mlp.mean": lambda layer: by_a_hook(layer, torch.is_grad_enabled),
    "mlp.mean": in_backward,
}


@pytest.mark.parametrize("name", MOVING)
def test_a_buffer_that_changes_later_forwards_is_refused_by_name(tmp_path, name):
    trainer = make(tmp_path, model_with(MOVING[name]))
    before = {path: buffer.clone() for path, buffer in trainer.model.named_buffers()}
    with pytest.raises(SplitDependentError, match=rf"moves the buffer \S*{name},.*allow_split_dependent=True"):
        trainer.train()
    assert all(torch.equal(buffer, before[path]) for path, buffer in trainer.model.named_buffers())
    assert all(p.grad is None for p in trainer.model.parameters())


def test_it_can_be_trained_with_a_warning_and_then_depends_on_the_split(tmp_path, caplog):
    def update(size: int) -> torch.Tensor:
        kept = {"allow_split_dependent": True, "per_device_train_batch_size": size, "max_steps": 1}
        return change(make(tmp_path / str(size), model_with(parametrizations.spectral_norm), **kept))

    assert error(update(16), update(4)) > DIFFERENT
    assert "does not cover this run: a training forward moves the buffer" in caplog.text


@pytest.mark.parametrize("reader", [0, 1])
def test_a_buffer_of_two_modules_is_refused_and_stays_as_it_was(tmp_path, reader):
    model, state = tiny_model(), torch.zeros(32)
    for number, layer in enumerate(model.model.layers[:2]):
        layer.mlp = Shared(layer.mlp, state)
        layer.mlp.moves = number != reader
    with pytest.raises(SplitDependentError, match=r"moves the buffer \S*layers.0.mlp.state,"):
        make(tmp_path, model).train()
    assert all(layer.mlp.state is state for layer in model.model.layers[:2])
    assert not state.any()


@pytest.mark.parametrize("kind", few_of([None, Counter, Cache], [Counter]))
def test_buffers_that_change_nothing_train(tmp_path, kind):
    def update(size: int) -> torch.Tensor:
        return change(make(tmp_path / str(size), model_with(kind), per_device_train_batch_size=size, max_steps=1))

    assert error(update(16), update(4)) < UPDATE


def test_rope_that_follows_the_length_trains(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model("llama", rope_parameters=scaling, max_position_embeddings=32)
    assert change(make(tmp_path, model, max_steps=1)).any()


def test_an_evaluating_spectral_norm_trains(tmp_path):
    model = model_with(parametrizations.spectral_norm)
    parametrization = model.model.layers[0].mlp.up_proj.parametrizations.weight[0]
    parametrization.train = lambda mode=True: parametrization
    parametrization.training = False
    assert change(make(tmp_path, model, max_steps=1)).any()
