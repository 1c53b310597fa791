"""On a GPU: models that padding changes, experts of few tokens, users' hooks and buffers, what is not finite."""

import functools
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations

from grpo_ext.algorithms.losses import PPO_CLIPPED, LossConfig, TokenBatch, row_sums, token_loss
from grpo_ext.errors import PrecisionError, SplitDependentError
from grpo_ext.forward import choice
from tests.distributed import unused
from tests.support.gpu import DEVICE, TOY, needs_gpu
from tests.support.padding import Canon, CausalMean, recurrent_gemma, with_hook, with_module
from tests.support.tiny import letter_reward, tiny_model
from tests.support.trainers import change, error, make, parameters, update
from tests.tolerances import DIFFERENT

pytestmark = [pytest.mark.gpu, needs_gpu]
HERE = {"use_cpu": TOY}
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 2, **HERE}
KERNELS = 1e-3  # between micro-batches: a GPU chooses its kernels, TF32 among them, by the shapes of products
CHANGED = {
    "recurrent_gemma": recurrent_gemma,
    "mean": lambda: with_module(CausalMean),
    "convolution": lambda: with_module(Canon),
    "zero": lambda: with_module(functools.partial(Canon, kernel=[0.0] * 4)),
    "rows": lambda: with_hook(0),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_model_that_padding_changes_has_one_update(record_property, tmp_path, kind):
    steps = {"max_steps": 3, "learning_rate": 1e-2} if kind == "zero" else {"max_steps": 1}
    one, other = (
        update(tmp_path / str(size), CHANGED[kind](), per_device_train_batch_size=size, **steps, **HERE)[0]
        for size in (16, 1)
    )
    record_property("between micro-batches", error(one, other))
    assert error(one, other) <= KERNELS


def test_padded_rows_of_such_a_model_give_another_update(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "why_form_fails", lambda *args: None)
    settings = {"forward": "padded", "max_steps": 1, **HERE}
    one, other = (
        update(tmp_path / str(size), CHANGED["mean"](), per_device_train_batch_size=size, **settings)[0]
        for size in (16, 1)
    )
    assert error(one, other) > DIFFERENT


def test_a_model_that_padding_changes_samples_rows_of_one_length(record_property, tmp_path):
    settings = {"max_steps": 1, "max_completion_length": 8, **HERE}
    trainer = update(tmp_path, CHANGED["recurrent_gemma"](), **settings)[1]
    [difference] = [log["sampling/logp_difference"] for log in trainer.state.log_history if "loss" in log]
    record_property("sampling against training", difference)
    assert difference <= KERNELS


@pytest.mark.parametrize("name", ["sgd", "bitwise"])
def test_experts_of_few_tokens_move_in_every_split_alike(record_property, tmp_path, name):
    (one, moved), (other, moved_again) = (
        unused.run(tmp_path / str(size), name, letter_reward, per_device_train_batch_size=size, **HERE)
        for size in (8, 3)
    )
    record_property("between micro-batches", error(one, other))
    assert moved == moved_again
    assert any(moved)
    assert torch.equal(one, other) if name == "bitwise" else error(one, other) <= KERNELS


def test_a_hook_on_gradients_runs_once_in_a_step(record_property, tmp_path):
    def learned(size: int, hooks: bool = True) -> torch.Tensor:
        trainer = make(tmp_path / f"{size}-{hooks}", per_device_train_batch_size=size, **SGD)
        for parameter in trainer.model.parameters() if hooks else ():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return change(trainer)

    whole, parts = learned(16), learned(3)
    record_property("between micro-batches", error(whole, parts))
    assert error(whole, parts) <= KERNELS
    assert error(learned(16, hooks=False), whole) > DIFFERENT


def test_a_buffer_that_a_forward_moves_is_refused(tmp_path):
    model = tiny_model()
    parametrizations.spectral_norm(model.model.layers[0].mlp.up_proj)
    with pytest.raises(SplitDependentError, match=r"up_proj\.parametrizations"):
        make(tmp_path, model, **SGD).train()


@pytest.mark.parametrize("loss_type", [*PPO_CLIPPED, "sapo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ratio_that_overflows_has_a_finite_gradient(loss_type, dtype):
    logps = torch.tensor([-0.5, -1.0, -1.5], device=DEVICE, dtype=dtype, requires_grad=True)
    old = logps.detach() - torch.tensor([0.1, 100.0, -0.1], device=DEVICE)
    lengths = torch.tensor([3], device=DEVICE)
    batch = TokenBatch(logps, torch.ones(3, device=DEVICE), torch.ones(1, 1, device=DEVICE), lengths, old)
    loss = token_loss(LossConfig(loss_type), batch).loss_S.sum()
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logps)[0].isfinite().all()


def test_sums_of_a_row_have_the_same_bits_alone_and_beside_other_rows():
    lengths = [9001, 3, 0, 20003, 64]
    rows = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)).to(DEVICE).split(lengths)

    def sums(some: list[torch.Tensor]) -> torch.Tensor:
        return row_sums(torch.cat(some), torch.tensor([len(row) for row in some], device=DEVICE))

    whole = sums([*rows])
    assert torch.equal(whole, torch.cat([sums([row]) for row in rows]))
    assert torch.equal(whole, sums([*rows[::-1]]).flip(0))
    exact = torch.stack([row.double().sum() for row in rows])
    torch.testing.assert_close(whole[:, 0].double(), exact, rtol=1e-6, atol=1e-9)
    assert not sums([torch.zeros(0, device=DEVICE)] * 2).any()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_gradient_that_is_not_finite_moves_no_weight(tmp_path, precision):
    trainer = make(tmp_path, bf16=precision == "bf16", **SGD)
    before = parameters(trainer)

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0 * (output - output.detach()).sqrt()

    trainer.model.model.layers[1].mlp.register_forward_hook(spoil)
    with pytest.raises(PrecisionError, match=r"gradient of step 1 is nan: .* output of model\.layers\.1\.mlp"):
        trainer.train()
    assert torch.equal(parameters(trainer), before)


@pytest.mark.skipif(TOY, reason="a CUDA device's own compiler, and host memory that is pinned")
@pytest.mark.parametrize("kind", ["compiled", "offloaded"])
def test_compiled_models_and_offloaded_checkpoints_give_the_plain_update(record_property, tmp_path, kind):
    model: Any = torch.compile(tiny_model()) if kind == "compiled" else tiny_model()
    offload = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
    plain = change(make(tmp_path / "plain", **SGD))
    found = change(make(tmp_path / kind, model, **SGD, **(offload if kind == "offloaded" else {})))
    record_property("against the plain update", error(plain, found))
    assert error(plain, found) <= KERNELS
