"""A registered policy loss in the trainer: weights and denominators stay ours, and what adds nothing is not run."""

import re
from typing import Any

import pytest
import torch

from grpo_ext import GRPOConfig
from grpo_ext.algorithms import policy_losses
from grpo_ext.errors import ConfigError
from tests.support.tiny import config_kwargs, sparse_reward, topr_near
from tests.support.trainers import make, parameters

# two updates per rollout, steps that cut groups, groups with advantage zero
REUSED = {"rollout_batch_size": 36, "global_batch_size": 18, "num_iterations": 2, "max_steps": 4}


def learned(folder: Any, **changes: Any) -> torch.Tensor:
    trainer = make(folder, reward=sparse_reward, **{**REUSED, **changes})
    trainer.train()
    return parameters(trainer)


@pytest.fixture
def register(monkeypatch) -> Any:
    """Registers a loss as "mine", and forgets it at the end of the test."""

    def registered(function: Any, zero_at_zero: bool) -> None:
        monkeypatch.setitem(policy_losses.POLICY_LOSSES, "mine", (function, zero_at_zero))

    return registered


def clipped(logps_BT, old_BT, advantages_B1, mask_BT):
    ratio_BT = (logps_BT - old_BT).exp()
    return -torch.min(ratio_BT * advantages_B1, ratio_BT.clamp(0.8, 1.2) * advantages_B1)


@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [pytest.param("dapo", None, marks=pytest.mark.full), ("grpo", "sequence_mean")]
)
def test_the_loss_of_this_package_written_by_a_user_learns_the_same(tmp_path, register, loss_type, aggregation):
    register(clipped, True)
    theirs = learned(tmp_path / "mine", loss_type="mine", loss_aggregation=aggregation)
    assert torch.equal(theirs, learned(tmp_path / "ours", loss_type=loss_type))
    register(lambda logps, old, advantages, mask: -advantages * logps, True)
    assert not torch.equal(theirs, learned(tmp_path / "other", loss_type="mine", loss_aggregation=aggregation))


def test_completions_with_advantage_zero_run_where_they_add_to_the_loss(tmp_path, register):
    register(topr_near, False)
    ran = learned(tmp_path / "ran", loss_type="mine")
    everything = learned(tmp_path / "everything", loss_type="mine", skip_zero_contribution=False)
    assert torch.equal(ran, everything)
    # the control: with a registration that says otherwise after the check, they are skipped
    trainer = make(tmp_path / "skipped", reward=sparse_reward, loss_type="mine", **REUSED)
    register(topr_near, True)
    trainer.train()
    assert not torch.equal(ran, parameters(trainer))


def test_it_is_checked_when_the_configuration_is_made(tmp_path, register):
    register(lambda logps, old, advantages, mask: -advantages * logps / mask.sum(), True)
    with pytest.raises(ConfigError, match="'mine' depends on the split"):
        GRPOConfig(**config_kwargs(tmp_path, loss_type="mine"))


def test_what_computes_ratios_itself_takes_no_setting_of_ratios(tmp_path, register):
    register(topr_near, False)
    for theirs in ({"importance_sampling_level": "sequence"}, {"delta": 2.0}):
        with pytest.raises(ConfigError, match="computes ratios and bounds itself"):
            GRPOConfig(**config_kwargs(tmp_path, loss_type="mine", **theirs))
    with pytest.raises(ConfigError, match=r"trust_region='tv'.*loss_type='mine'"):
        GRPOConfig(**config_kwargs(tmp_path, loss_type="mine", trust_region="tv", trust_region_threshold=0.1))


REMARKS: dict[str, dict[str, Any]] = {
    r"epsilon=0\.3 does nothing": {"trust_region": "tv", "trust_region_threshold": 0.1, "epsilon": 0.3, **REUSED},
    r"sequence_mask_high leaves nothing out": {"sequence_mask_high": 1.1, "max_steps": 1},
}


@pytest.mark.full
def test_a_setting_without_effect_is_remarked_upon(tmp_path, caplog):
    for number, words in enumerate(REMARKS):
        make(tmp_path / f"remarked {number}", **REMARKS[words]).train()
        assert re.search(words, caplog.text), words
        caplog.clear()
    make(tmp_path / "plain", sequence_mask_high=1.1, **REUSED).train()
    assert not any(re.search(each, caplog.text) for each in REMARKS)
