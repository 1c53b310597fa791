"""What TRL reads at each loss is read there too: a callback or a subclass that changes it trains as stock TRL does."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from tests.support.beside_trl import build, changing, learns_as_in_trl, setting
from tests.support.tiny import stock_scores

# two steps for a rollout batch of one step: in the second the policy has moved, so that clips and ratios act
REUSED: dict[str, Any] = {"num_iterations": 2, "max_steps": 4, "loss_type": "grpo"}


CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("beta", 0.5, {"beta": 0.01}),
    ("beta", 0.0, {"beta": 0.5}),
    ("epsilon_low", 0.01, {}),
    ("importance_sampling_level", "sequence", {}),
    ("loss_type", "dr_grpo", {}),
    ("args.delta", 1.001, {"epsilon_high": 5.0}),
    ("top_entropy_quantile", 0.3, {}),
    ("max_completion_length", 30, {"loss_type": "dr_grpo", "max_grad_norm": 0.0}),
    ("entropy_coef", 0.5, {"entropy_coef": 0.001}),
]


@stock_scores
@pytest.mark.parametrize(
    ("name", "value", "settings"),
    CASES,
    ids=str,
)
def test_a_setting_that_a_callback_changes_acts_from_then_on(tmp_path, name, value, settings):
    learns_as_in_trl(tmp_path, changing(setting(name, value)), **{**REUSED, **settings})


class SetsAfterwards:
    """As one who sets a schedule's first values once the trainer is built."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epsilon_low, self.loss_type, self.args.delta = 0.01, "luspo", 1.05


@stock_scores
def test_a_setting_that_a_subclass_changes_acts_from_the_start(tmp_path):
    learns_as_in_trl(tmp_path, SetsAfterwards, **REUSED)


def test_a_kl_term_without_reference_log_probabilities_is_refused(tmp_path):
    """The rollout batch of the third step has been scored by then."""

    def changed(trainer: Any) -> None:
        trainer._rollouts.batch.ref_per_token_logps = None

    with pytest.raises(ConfigError, match=r"beta=0\.1 asks for the KL term"):
        build(tmp_path, GRPOTrainer, changing(changed), **{**REUSED, "beta": 0.1, "num_iterations": 4}).train()


def test_an_unknown_loss_type_is_refused_when_it_is_set(tmp_path):
    with pytest.raises(ConfigError, match="loss_type='ppo' is unknown"):
        build(tmp_path, GRPOTrainer, changing(setting("loss_type", "ppo")), **REUSED).train()
