"""What TRL reads at each loss is read there too: a callback or a subclass that changes it trains as stock TRL does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import trl

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.errors import ConfigError
from tests.support.own_generate import Sampler, apart, change
from tests.support.tiny import config_kwargs, letter_reward, prompts, stock_scores, tiny_model, tiny_tokenizer
from tests.tolerances import ADAM_EPSILON, DIFFERENT, UPDATE

# two steps for a rollout batch of one step: in the second the policy has moved, so that clips and ratios act
SETTINGS: dict[str, Any] = {
    "shuffle_dataset": False,
    "adam_epsilon": ADAM_EPSILON,
    "learning_rate": 1e-2,
    "num_iterations": 2,
    "max_steps": 4,
    "loss_type": "grpo",
}
Change = Callable[[Any], None]


def build(folder: Any, base: type, changed: Change | None = None, size: int = 16, **settings: Any) -> Any:
    """A trainer; a callback changes it before the third step."""

    class Changes(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and changed is not None:
                changed(trainer)

    kwargs = config_kwargs(folder, **{**SETTINGS, "per_device_train_batch_size": size, **settings})
    config: Any = GRPOConfig
    if not issubclass(base, GRPOTrainer):
        config = trl.GRPOConfig
        del kwargs["global_batch_size"], kwargs["rollout_chunk_size"]
    model = tiny_model()
    model.save_pretrained(str(folder) + "-reference")
    model.config._name_or_path = str(folder) + "-reference"
    model.generate = Sampler()
    trainer = base(model, letter_reward, config(**kwargs), prompts(8), processing_class=tiny_tokenizer())
    trainer.add_callback(Changes())
    return trainer


def setting(name: str, value: Any) -> Change:
    """`name` may begin with "args."."""

    def changed(trainer: Any) -> None:
        owner = trainer.args if name.startswith("args.") else trainer
        setattr(owner, name.removeprefix("args."), value)

    return changed


CASES: list[tuple[str, Any, dict[str, Any]]] = [  # those from FEW on are read beside one of the others
    ("beta", 0.5, {"beta": 0.01}),
    ("beta", 0.0, {"beta": 0.5}),
    ("epsilon_low", 0.01, {}),
    ("epsilon_high", 0.5, {"loss_type": "cispo", "epsilon_high": 1.5}),
    ("importance_sampling_level", "sequence", {}),
    ("loss_type", "dr_grpo", {}),
    ("args.delta", 1.001, {"epsilon_high": 5.0}),
    ("off_policy_mask_threshold", 0.0001, {}),
    ("args.vespo_k_pos", 8.0, {"loss_type": "vespo"}),
    ("top_entropy_quantile", 0.3, {}),
    ("max_completion_length", 30, {"loss_type": "dr_grpo", "max_grad_norm": 0.0}),
    ("entropy_coef", 0.5, {"entropy_coef": 0.001}),
    ("epsilon_high", 0.01, {}),
    ("loss_type", "sapo", {}),
    ("loss_type", "dapo", {}),
    ("args.use_bias_correction_kl", False, {"beta": 0.5, "use_bias_correction_kl": True}),
    ("args.sapo_temperature_pos", 5.0, {"loss_type": "sapo"}),
    ("args.sapo_temperature_neg", 5.0, {"loss_type": "sapo"}),
    ("args.vespo_lambda_pos", 0.5, {"loss_type": "vespo"}),
    ("args.vespo_k_neg", 8.0, {"loss_type": "vespo"}),
    ("args.vespo_lambda_neg", 0.5, {"loss_type": "vespo"}),
]
FEW = CASES.index(("epsilon_high", 0.01, {}))


@stock_scores
@pytest.mark.parametrize(
    ("name", "value", "settings"),
    [*CASES[:FEW], *(pytest.param(*case, marks=pytest.mark.full) for case in CASES[FEW:])],
    ids=str,
)
def test_a_setting_that_a_callback_changes_acts_from_then_on(tmp_path, name, value, settings):
    changed = setting(name, value)
    stock = change(build(tmp_path / "stock", trl.GRPOTrainer, changed, **settings))
    assert apart(stock, change(build(tmp_path / "plain", trl.GRPOTrainer, **settings))) > DIFFERENT
    for size in (16, 5):
        ours = change(build(tmp_path / f"{size}", GRPOTrainer, changed, size, **settings))
        assert apart(stock, ours) < UPDATE, size


class SetsAfterwards:
    """As one who sets a schedule's first values once the trainer is built."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epsilon_low, self.loss_type, self.args.delta = 0.01, "luspo", 1.05


@stock_scores
def test_a_setting_that_a_subclass_changes_acts_from_the_start(tmp_path):
    stock = change(build(tmp_path / "stock", type("Own", (SetsAfterwards, trl.GRPOTrainer), {})))
    assert apart(stock, change(build(tmp_path / "plain", trl.GRPOTrainer))) > DIFFERENT
    for size in (16, 5):
        ours = change(build(tmp_path / f"{size}", type("Own", (SetsAfterwards, GRPOTrainer), {}), size=size))
        assert apart(stock, ours) < UPDATE, size


def test_a_kl_term_without_reference_log_probabilities_is_refused(tmp_path):
    """The rollout batch of the third step has been scored by then."""

    def changed(trainer: Any) -> None:
        trainer._rollouts.batch.ref_per_token_logps = None

    with pytest.raises(ConfigError, match=r"beta=0\.1 asks for the KL term"):
        build(tmp_path, GRPOTrainer, changed, beta=0.1, num_iterations=4).train()


def test_an_unknown_loss_type_is_refused_when_it_is_set(tmp_path):
    with pytest.raises(ConfigError, match="loss_type='ppo' is unknown"):
        build(tmp_path, GRPOTrainer, setting("loss_type", "ppo")).train()


def test_settings_that_nobody_changes_are_those_of_the_configuration(tmp_path):
    one, other = (
        build(tmp_path / name, GRPOTrainer, changed) for name, changed in (("a", None), ("b", lambda _: None))
    )
    assert torch.equal(change(one), change(other))
