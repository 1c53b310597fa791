"""A registered policy loss: what it gets, and what is refused before training."""

import pytest
import torch

from grpo_ext.algorithms import policy_losses
from grpo_ext.algorithms.losses import LossConfig, TokenBatch, token_loss
from grpo_ext.algorithms.policy_losses import adds_at_zero_advantage, check_policy_loss, register_policy_loss
from grpo_ext.errors import ConfigError
from tests.support.loss_steps import token_batch


@pytest.fixture(autouse=True)
def losses(monkeypatch) -> None:
    """What a test registers is forgotten at its end."""
    for name in ("mine", "near", "topr"):
        monkeypatch.setitem(policy_losses.POLICY_LOSSES, name, (reinforce, False))
        monkeypatch.delitem(policy_losses.POLICY_LOSSES, name)


def reinforce(logps_BT, old_BT, advantages_B1, mask_BT):
    return -advantages_B1 * logps_BT


def row_mean(logps_BT, old_BT, advantages_B1, mask_BT):
    """A mean over a completion's own tokens is the same in every micro-batch."""
    log_ratio_B1 = ((logps_BT - old_BT) * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
    return (-advantages_B1 * log_ratio_B1.exp()).expand_as(logps_BT)


@pytest.mark.parametrize("function", [reinforce, row_mean])
def test_a_loss_of_rows_is_taken(function):
    register_policy_loss("mine", zero_at_zero_advantage=True)(function)
    check_policy_loss("mine")
    assert not adds_at_zero_advantage("mine")


DEPENDS = {
    "scaled by the batch": lambda logps, old, advantages, mask: -advantages / advantages.abs().mean() * logps,
    "a mean over the batch": lambda logps, old, advantages, mask: (-advantages * logps).mean().expand_as(logps),
    "a mean over padding": lambda logps, old, advantages, mask: (
        -advantages * logps.mean(1, keepdim=True) * (mask + 0.0)
    ),
    "only its gradient": lambda logps, old, advantages, mask: logps - logps.detach() + (logps - logps.detach()).sum(),
}


@pytest.mark.parametrize("name", DEPENDS)
def test_a_loss_that_depends_on_the_split_is_refused(name):
    register_policy_loss("mine")(DEPENDS[name])
    with pytest.raises(ConfigError, match=r"'mine' depends on the split: the losses of a completion are \[.*row"):
        check_policy_loss("mine")


def test_with_a_teacher_advantages_have_padding_too():
    def balanced(logps_BT, old_BT, advantages, mask_BT):
        return -(advantages - advantages.mean(1, keepdim=True)) * logps_BT

    register_policy_loss("mine")(balanced)
    check_policy_loss("mine")
    with pytest.raises(ConfigError, match="depends on the split"):
        check_policy_loss("mine", per_token=True)


def test_a_loss_may_write_to_what_it_is_given():
    def careless(logps_BT, old_BT, advantages, mask_BT):
        mask_BT.zero_()
        return -advantages.mul_(2) * logps_BT

    register_policy_loss("mine")(careless)
    batch = token_batch(torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2), torch.tensor([0.5]))
    for _ in range(2):
        assert token_loss(LossConfig(loss_type="mine"), batch).loss_S.tolist() == [1.0, 3.0]
    assert batch.mask_S.all()


@pytest.mark.parametrize("lengths", [[2, 0, 3], [0, 0]])
def test_a_loss_gets_padded_rows_whatever_their_lengths(lengths):
    """Zero, with a mask of zero, after the last token of each; what it returns there is left out."""
    given = []

    def kept(*values):
        given.extend(values)
        return -values[2] * values[0] - 7 * (1 - values[3])

    register_policy_loss("mine")(kept)
    tokens = torch.arange(1.0, 1 + sum(lengths))
    batch = TokenBatch(tokens, torch.ones(len(tokens)), torch.ones(len(lengths), 1), torch.tensor(lengths))
    loss = token_loss(LossConfig(loss_type="mine"), batch).loss_S
    assert loss.tolist() == (-tokens).tolist()
    if sum(lengths):
        columns = [[1.0, 2.0, 0.0], [0.0] * 3, [3.0, 4.0, 5.0]]
        mask = [[1.0, 1.0, 0.0], [0.0] * 3, [1.0] * 3]
        assert [value.tolist() for value in given] == [columns, columns, [[1.0]] * 3, mask]


def test_a_name_is_needed():
    with pytest.raises(ConfigError, match=r"policy loss <function reinforce .* or is not a string"):
        register_policy_loss(reinforce)  # a decorator without parentheses


BROKEN = {
    "returned (4, 1) for log-probabilities of shape (4, 5)": lambda logps, old, advantages, mask: -advantages,
    "returned () for": lambda logps, old, advantages, mask: (-advantages * logps).sum(),
    "returned float for": lambda logps, old, advantages, mask: 0.5,
    "or has no gradient with respect to them": lambda logps, old, advantages, mask: -advantages * old,
    "not finite on padding": lambda logps, old, advantages, mask: logps / mask,
    "divide by mask.sum(1, keepdim=True).clamp(min=1)": lambda logps, old, advantages, mask: (
        -advantages * logps / mask.sum(1, keepdim=True)
    ),
    "failed on log-probabilities of shape (4, 5)": lambda logps, old: logps,
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_loss_that_is_not_one_per_token_is_refused(words):
    register_policy_loss("mine")(BROKEN[words])
    with pytest.raises(ConfigError) as refused:
        check_policy_loss("mine")
    assert words in str(refused.value)


def test_a_loss_that_adds_at_advantage_zero_must_not_say_otherwise():
    def near(logps_BT, old_BT, advantages_B1, mask_BT):
        return -advantages_B1 * logps_BT + (logps_BT - old_BT) ** 2

    register_policy_loss("near")(near)
    check_policy_loss("near")
    assert adds_at_zero_advantage("near")
    register_policy_loss("near", zero_at_zero_advantage=True)(near)
    with pytest.raises(ConfigError, match="advantage zero add to it; leave that out"):
        check_policy_loss("near")


def test_names_that_are_taken_or_unknown_are_refused():
    with pytest.raises(ConfigError, match="'dapo' comes with grpo_ext"):
        register_policy_loss("dapo")(reinforce)
    register_policy_loss("topr")(reinforce)
    with pytest.raises(ConfigError, match=r"loss_type='mine' is unknown; use one of grpo, .*topr"):
        LossConfig(loss_type="mine")


def test_a_loss_is_read_from_a_file(tmp_path, monkeypatch):
    file = tmp_path / "losses.py"
    file.write_text("def mine(logps, old_logps, advantages, mask):\n    return -2 * advantages * logps\n")
    name = f"{file}:mine"
    monkeypatch.setitem(policy_losses.POLICY_LOSSES, name, (reinforce, False))
    monkeypatch.delitem(policy_losses.POLICY_LOSSES, name)
    batch = token_batch(torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2), torch.tensor([0.5]))
    assert token_loss(LossConfig(loss_type=name), batch).loss_S.tolist() == [1.0, 3.0]
    with pytest.raises(ConfigError, match="defines no Callable theirs; it defines mine"):
        LossConfig(loss_type=f"{file}:theirs")


def test_masks_and_the_kl_term_come_on_top():
    register_policy_loss("mine")(reinforce)
    logps = torch.tensor([[-1.0, -2.0], [-0.5, -1.0]], requires_grad=True)
    batch = token_batch(
        logps,
        torch.ones(2, 2),
        torch.tensor([2.0, -1.0]),
        old_logps_S=logps.detach() - torch.tensor([[0.0], [0.1]]),
        ref_logps_S=logps.detach() - 1,
    )
    cfg = LossConfig(loss_type="mine", beta=0.5, sequence_mask_high=1.05, use_bias_correction_kl=False)
    kl = torch.exp(torch.tensor(-1.0)).item()  # exp(-1) + 1 - 1
    expected = torch.tensor([[2.0, 4.0], [0.0, 0.0]]) + 0.5 * kl
    torch.testing.assert_close(token_loss(cfg, batch).loss_S.detach(), expected.flatten())
