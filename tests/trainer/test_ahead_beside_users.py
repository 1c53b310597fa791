"""Sampling ahead of training beside what users do: subclasses, callbacks, contexts around `train()`, exits."""

import contextvars
import threading
import time
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError, ModelError
from tests.support.tiny import tiny_model
from tests.support.trainers import log_of, make, on, parameters, passing_on, watched


def longer(trainer: GRPOTrainer, seconds: float) -> TrainerCallback:
    """Lets completions grow; and takes its time."""

    def grow(state: Any) -> None:
        trainer.generation_config.max_new_tokens = 4 + 2 * state.global_step
        if state.global_step == 2:
            trainer.reward_funcs[0] = lambda completions, **columns: [float(len(text)) for text in completions]
        time.sleep(seconds)

    return on("on_step_end", grow)


def test_settings_of_sampling_and_rewards_change_with_the_steps_and_not_with_the_speed(tmp_path):
    runs = []
    for training, rewards in ((0.3, 0.0), (0.0, 0.3)):
        reward = watched(lambda slow=rewards, **columns: time.sleep(slow))
        settings = {"rollout_lag": 2, "max_steps": 5, "max_completion_length": 4, "rollout_chunk_size": 16}
        trainer = make(tmp_path / str(training), reward=reward, **settings)
        trainer.add_callback(longer(trainer, training))
        trainer.train()
        runs.append(trainer)
    assert torch.equal(parameters(runs[0]), parameters(runs[1]))
    assert log_of(runs[0], "completions/max_length") == log_of(runs[1], "completions/max_length")
    assert log_of(runs[0], "completions/max_length")[-1] > 4
    assert log_of(runs[0], "reward")[-1] > 2.0  # no share of letters


@pytest.mark.parametrize("dynamic", [False, True])
def test_rewards_are_joined_and_logged_as_at_the_submission(tmp_path, dynamic):
    def one(completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    settings = {"dynamic_sampling": dynamic, "dynamic_sampling_max_rounds": 1} if dynamic else {}

    def replace_rewards(state: Any) -> None:
        trainer.reward_funcs = [lambda completions, v=value, **_: [v] * len(completions) for value in (2.0, 3.0)]
        trainer.reward_func_names = ["two", "three"]
        trainer.reward_processing_classes = [None, None]
        trainer.reward_weights = torch.tensor([1.0, 10.0])

    trainer = make(tmp_path, reward=one, rollout_lag=2, max_steps=5, **settings)
    trainer.add_callback(on("on_step_end", replace_rewards, at=1))
    trainer.train()
    assert log_of(trainer, "reward") == [1.0, 1.0, 1.0, 32.0, 32.0]
    assert log_of(trainer, "rewards/one/mean") == [1.0] * 3
    assert log_of(trainer, "rewards/three/mean") == [3.0] * 2


request: contextvars.ContextVar[str] = contextvars.ContextVar("request")


def test_what_is_set_around_training_is_set_for_sampling(tmp_path):
    seen: set[tuple[str, str]] = set()

    reward = watched(lambda **columns: seen.add((threading.current_thread().name, request.get())))
    token = request.set("seven")
    try:
        trainer = make(tmp_path, reward=reward, rollout_lag=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            trainer.train()
    finally:
        request.reset(token)
    assert seen == {("rollouts", "seven")}
    # nothing has been trained yet: old log-probabilities are those of the policy only in the same precision
    assert log_of(trainer, "sampling/ratio_max")[0] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("copied", "words"), [({"rollout_lag": 1}, "cannot be copied"), ({"beta": 0.1}, "a folder that")]
)
def test_a_model_that_cannot_be_copied_is_refused_where_it_has_to_be(tmp_path, copied, words):
    model = tiny_model()
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match=words):
        make(tmp_path / "one", model=model, **copied)
    make(tmp_path / "two", model=model)


def test_noise_that_speed_would_order_is_refused(tmp_path):
    settings = {"allow_split_dependent": True, "disable_dropout": False}
    noisy = tiny_model()
    noisy.config.attention_dropout = 0.1
    for layer in noisy.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ConfigError, match=r"attention_dropout=0.1 .two threads would draw from one stream"):
        make(tmp_path / "one", model=noisy, rollout_lag=1, **settings)
    make(tmp_path / "two", rollout_lag=1, **settings)


@pytest.mark.parametrize("name", ["_generate_and_score_completions", "_tokenize_prompts"])
def test_an_override_of_sampling_is_refused_with_a_lag(tmp_path, name):
    subclass = passing_on(name)
    with pytest.raises(ConfigError, match=rf"Own\.{name}: .* Use rollout_lag=0"):
        make(tmp_path, cls=subclass, rollout_lag=1)
    make(tmp_path / "without", cls=subclass)
    assigned = make(tmp_path / "assigned", rollout_lag=1)
    setattr(assigned, name, getattr(subclass, name))
    with pytest.raises(ConfigError, match=rf"GRPOTrainer\.{name}: .* Use rollout_lag=0"):
        assigned.train()


class Gathering(GRPOTrainer):
    """Overrides that gather, as TRL's methods do."""

    gathered: set[tuple[str, str, int]]

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        self.gathered.add(("rewards", threading.current_thread().name, len(self.accelerator.gather(torch.ones(2)))))
        return super()._calculate_rewards(*args)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self.gathered.add(("logps", threading.current_thread().name, 0))
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def test_overrides_that_work_with_a_lag_run_where_they_may_gather(tmp_path):
    Gathering.gathered = set()
    make(tmp_path, cls=Gathering, rollout_lag=1).train()
    where = {("rewards", "MainThread", 2), ("logps", "rollouts", 0), ("logps", "MainThread", 0)}
    assert Gathering.gathered == where
