"""Ratios of probabilities that overflow: a loss that does not depend on them has a finite gradient."""

import math
from typing import Any

import pytest
import torch

from grpo_ext.algorithms import losses
from grpo_ext.algorithms.losses import PPO_CLIPPED, LossConfig, TokenBatch, token_loss
from tests.support.loss_steps import make, token_batch

FAR = 100.0  # a log-ratio; exp of it is infinite in float32
BOUNDED = (*PPO_CLIPPED, "sapo", "cispo", "vespo")
LEFT_OUT = {
    "mask": {"mask": [[1, 0, 1]]},
    "entropy": {"entropy_keep_S": [[1.0, 0.0, 1.0]]},
    "sampling ratio": {"sampling_ratio": [[1.0, 0.0, 1.0]], "correct_sampling": True},
    "off-policy mask": {"off_policy_mask_threshold": -1e3, "kept": []},
    "sequence mask": {"sequence_mask_high": 2.0, "kept": []},
}


def far_losses(
    loss_type: str,
    advantage: float,
    level: str = "token",
    far: float = FAR,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of three tokens, of which the second (at the level of sequences all) has a ratio far from one.

    Their gradient with respect to the log-probabilities comes second.
    """
    columns = {n: torch.tensor(more.pop(n), dtype=dtype) for n in ("entropy_keep_S", "sampling_ratio") if n in more}
    mask = torch.tensor(more.pop("mask", [[1, 1, 1]]))
    cfg = LossConfig(loss_type, level, epsilon_high=5.0 if loss_type == "cispo" else 0.2, **more)
    logps = torch.tensor([[-0.5, -1.0, -1.5]], dtype=dtype, requires_grad=True)
    ratios = torch.tensor([[far] * 3 if level == "sequence" else [0.1, far, -0.1]], dtype=dtype)
    columns["old_logps_S"] = logps.detach() - ratios
    batch = token_batch(logps, mask, torch.tensor([advantage], dtype=dtype), **columns)
    loss = token_loss(cfg, batch).loss_S * mask[0]
    return loss.detach(), torch.autograd.grad(loss.sum(), logps)[0][0]


def limit(loss_type: str, advantage: float, delta: float | None) -> tuple[float, float] | None:
    """Loss and gradient of a token as its ratio tends to infinity, by hand; None where they do."""
    if loss_type == "sapo":
        return -4 * advantage / (1.0 if advantage > 0 else 1.05), 0.0
    if loss_type == "cispo":
        return 5.0 * advantage, -5.0 * advantage  # the log-probability is -1
    if loss_type == "vespo":
        return 0.0, 0.0
    if advantage >= 0:
        return -1.2 * advantage, 0.0
    return None if delta is None else (-delta * advantage, 0.0)


@pytest.mark.parametrize("loss_type", BOUNDED)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 3.0])
@pytest.mark.parametrize("advantage", [0.7, 0.0, -0.7])
def test_a_ratio_that_overflows_has_the_loss_and_gradient_of_the_limit(loss_type, level, delta, advantage):
    expected = limit(loss_type, advantage, delta)
    loss, gradient = far_losses(loss_type, advantage, level, delta=delta)
    if expected is None:  # no minimum bounds it: the loss says so
        assert loss[1] == math.inf
        return
    assert gradient.isfinite().all()
    assert loss[1].item() == pytest.approx(expected[0], rel=1e-6, abs=1e-12)
    if level == "token":
        assert gradient[1].item() == pytest.approx(expected[1], rel=1e-6, abs=1e-12)
        exact = far_losses(loss_type, advantage, level, 1.0, dtype=torch.float64, delta=delta)
        for ours, other in zip((loss, gradient), exact):  # the neighbours
            assert torch.allclose(ours[[0, 2]].double(), other[[0, 2]], rtol=1e-5) or loss_type == "vespo"


@pytest.mark.parametrize("loss_type", [*PPO_CLIPPED, "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_without_the_bound_the_gradient_is_not_finite(monkeypatch, loss_type, level):
    monkeypatch.setattr(losses, "_LARGEST_LOG_RATIO", math.inf)
    loss, gradient = far_losses(loss_type, 0.7, level)
    assert loss.isfinite().all()
    assert gradient.isnan().any()


@pytest.mark.parametrize("loss_type", [*PPO_CLIPPED, "sapo"])
@pytest.mark.parametrize("why", LEFT_OUT)
def test_a_token_that_is_left_out_adds_nothing_whatever_its_ratio(loss_type, why):
    options = dict(LEFT_OUT[why])
    kept = options.pop("kept", [0, 2])
    loss, gradient = far_losses(loss_type, -0.7, **options)
    near, expected = far_losses(loss_type, -0.7, far=0.0, **options)
    others = [token for token in range(3) if token not in kept]
    assert not loss[others].any()
    assert not gradient[others].any()
    assert torch.equal(loss[kept], near[kept])
    assert torch.equal(gradient[kept], expected[kept])


@pytest.mark.parametrize("loss_type", BOUNDED)
@pytest.mark.parametrize("option", ["plain", "delta", "beta", "beta, bias correction", "everything"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_up_to_the_bound_every_bit_stays(monkeypatch, loss_type, option, level):
    def outcome() -> list[torch.Tensor]:
        cfg, batch = make(loss_type, level, option)
        batch = TokenBatch(
            **{n: v.float() if v.is_floating_point() else v for n, v in vars(batch).items() if v is not None}
        )
        batch.logps_S = batch.logps_S.detach().requires_grad_()
        tokens = token_loss(cfg, batch)
        return [tokens.loss_S, tokens.ratio, torch.autograd.grad(tokens.loss_S.sum(), batch.logps_S)[0]]

    bounded = outcome()
    monkeypatch.setattr(losses, "_bounded", lambda cfg, batch, log_ratio, factors: log_ratio)
    assert all(map(torch.equal, bounded, outcome()))


def test_a_kl_term_that_grows_with_the_ratio_stays_an_explosion():
    cfg = LossConfig("grpo", beta=0.1, use_bias_correction_kl=True)
    new, old = torch.tensor([[-1.0]]), torch.tensor([[-1.0 - FAR]])
    batch = token_batch(new, torch.ones(1, 1), torch.ones(1), old_logps_S=old, ref_logps_S=new - 0.5)
    assert token_loss(cfg, batch).loss_S.item() == math.inf
