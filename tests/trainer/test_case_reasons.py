"""Cases of a step that cannot be compared say why, and the rerun and its logs are as without them."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from grpo_ext.run import trail
from grpo_ext.run.case_comparison import case_text
from grpo_ext.run.cases import Cases
from grpo_ext.run.record import read_record
from tests.support.case_runs import ALL, RUN, TWICE, letters, rerun, rows_of, trained
from tests.support.selection import few_of
from tests.support.tiny import tiny_model
from tests.support.trainers import make


class _Scaled(GRPOTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        for weight in self.model.parameters():
            weight.grad *= 2.0
        return loss


class _Noise(GRPOTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        for weight in self.model.parameters():
            weight.grad = weight.grad + 0.01
        return loss


@pytest.mark.parametrize(
    ("cls", "most"),
    [
        (_Scaled, 1e-4),  # a clip that binds hides a factor
        (_Noise, 1e4),
        pytest.param(_Scaled, 1e4, marks=pytest.mark.full),
        pytest.param(_Noise, 1e-4, marks=pytest.mark.full),
    ],
)
def test_a_gradient_that_something_else_changes_is_not_compared(tmp_path, cls, most):
    folder = trained(tmp_path / "run", cls=cls, max_grad_norm=most)
    again = rerun(folder, 2, {"epsilon": 0.1}, {"loss_type": "dr_grpo"}, cls=cls, max_grad_norm=most)
    assert again.comparison.verdict == "same bits"
    for compared in again.cases:
        assert "not compared: the gradient of the step differs" in compared["text"]
        assert "override of training_step" in compared["text"]
    assert rows_of(again)[0]["cases"] == {}


class _Advantages(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        scored = super()._generate_and_score_completions(inputs)
        return {**scored, "advantages": scored["advantages"] * 2}


def test_advantages_that_do_not_follow_from_rewards_say_so_and_other_cases_are_compared(tmp_path):
    folder = trained(tmp_path / "run", cls=_Advantages)
    again = rerun(folder, 2, {"scale_rewards": "none"}, {"loss_type": "dr_grpo"}, cls=_Advantages)
    assert again.comparison.verdict == "same bits"
    refused, compared = again.cases
    assert "scale_rewards=none: not compared: it changes advantages" in refused["text"]
    assert "from the rewards in the record: an override made them" in refused["text"]
    assert compared["gradient"][ALL]["difference"] > 0


@pytest.mark.full
def test_rewards_that_are_others_when_they_are_called_again_are_said(tmp_path):
    def edited(completions: list[str], **columns: Any) -> list[float]:
        return [value + ("b" in text) for value, text in zip(letters(completions), completions, strict=True)]

    edited.__name__ = letters.__name__
    changes = {"max_steps": 4, "save_steps": 2}
    folder = trained(tmp_path / "run", reward=letters, **changes)
    trainer = make(folder, **{**RUN, **changes}, reward=edited)
    again = trainer.rerun(3, call_rewards=True, cases=[{"scale_rewards": "none"}, {"loss_type": "dr_grpo"}])
    assert again.comparison.verdict == "different"
    assert "functions, called again, gave other rewards" in again.cases[0]["text"]
    assert again.cases[1]["gradient"][ALL]["difference"] > 0


@pytest.mark.parametrize("most", few_of([4, 16], [4]))
def test_rewards_that_the_record_has_only_sums_of_are_said_to_be_computed_again(tmp_path, monkeypatch, caplog, most):
    monkeypatch.setattr(trail, "MOST_ENTRIES", most)  # of 16 completions
    folder = trained(tmp_path / "run", reward=letters)
    assert rerun(folder, np.int64(2), reward=letters).comparison.verdict == "same bits"
    assert ("only sums of so many rewards: the functions are called again" in caplog.text) == (most < 16)


def test_a_case_whose_loss_is_not_finite_leaves_the_rerun_and_other_cases_as_they_are(tmp_path):
    folder = trained(tmp_path / "run", reward=letters, scale_rewards="none")
    cases = {"entropy_coef": 3e38}, {"reward_weights": [2.0]}
    again = rerun(folder, 2, *cases, reward=letters, scale_rewards="none")
    assert again.comparison.verdict == "same bits"
    assert "not compared: the loss of step 2 is" in again.cases[0]["text"]
    assert again.cases[1]["gradient"][ALL]["ratio"] == pytest.approx(2.0, rel=1e-6)


# ---- Settings of the update -----------------------------------------------------------------------------------------


def test_an_epsilon_that_the_optimizer_does_not_have_is_not_a_case(tmp_path):
    folder = trained(tmp_path / "run", optim="sgd")
    [compared] = rerun(folder, 2, {"adam_epsilon": 1e-2}, optim="sgd").cases
    assert compared["text"].endswith("cannot be a case of a step: the optimizer has no eps=0.0001")


@pytest.mark.full
def test_a_rate_of_zero_moves_nothing_and_says_so(tmp_path):
    folder = trained(tmp_path / "run", reward=letters)
    [compared] = rerun(folder, 2, {"learning_rate": 0.0}, reward=letters).cases
    assert "nan" not in compared["text"]
    assert "all weights: gradient cosine 1.0000, norm x 1; update zero in the case" in compared["text"]


@pytest.mark.parametrize("weights", [["1.0"], [None], "1"])
def test_weights_that_are_not_numbers_are_refused_by_name(tmp_path, weights):
    with pytest.raises(ConfigError, match=r"reward_weights=.*(list of finite numbers|one weight for each)"):
        make(tmp_path / "run", **RUN).rerun(2, cases=[{"reward_weights": weights}])
    with pytest.raises(ConfigError, match=r"reward_weights=.*list of finite numbers"):
        make(tmp_path / "run", **RUN, reward_weights=weights)


def test_a_case_that_is_named_twice_is_refused(tmp_path):
    folder = trained(tmp_path / "run")
    one, reordered = {"delta": 2.0, "epsilon": 0.1}, {"epsilon": 0.1, "delta": 2.0}
    with pytest.raises(ConfigError, match=r"cases: delta=2\.0, epsilon=0\.1 is named twice; leave one of them out"):
        make(folder, **RUN).rerun(2, cases=[one, {"epsilon": 0.1}, reordered])


@pytest.mark.full
def test_a_rate_of_the_optimizers_own_is_not_a_case(tmp_path):
    def own() -> dict[str, Any]:
        model = tiny_model()
        return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}

    make(tmp_path / "run", **RUN, **own()).train()
    [compared] = make(tmp_path / "run", **RUN, **own()).rerun(2, cases=[{"learning_rate": 0.1}]).cases
    assert compared["text"].endswith("the optimizer's rate is not a part of learning_rate=0.01")


@pytest.mark.full
def test_a_bound_that_is_not_named_stays_as_a_script_has_set_it(tmp_path):
    class Own(GRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.epsilon_low = self.epsilon_high = 0.001

    settings = {**RUN, **TWICE}
    make(tmp_path / "run", cls=Own, **settings).train()
    again = make(tmp_path / "run", cls=Own, **settings).rerun(2, cases=[{"epsilon_high": 0.001}, {"epsilon": 0.2}])
    same, wider = again.cases
    assert same["gradient"][ALL]["difference"] == 0.0
    assert wider["gradient"][ALL]["difference"] > 0.0


@pytest.mark.full
def test_a_norm_of_zero_or_less_does_not_clip(tmp_path):
    folder = trained(tmp_path / "run", max_grad_norm=1e9)
    for compared in rerun(folder, 2, {"max_grad_norm": 0.0}, {"max_grad_norm": -1.0}, max_grad_norm=1e9).cases:
        assert compared["update"][ALL]["difference"] == 0.0


def test_states_in_float32_of_weights_in_bfloat16_stay_exact(tmp_path, monkeypatch):
    # a checkpoint would round them
    settings = {"optim": "adafactor", "bf16": False, "save_strategy": "no"}
    folder = trained(tmp_path / "run", model=tiny_model().bfloat16(), **settings)
    run, states = Cases.run, list[Any]()

    def noted(self: Cases, step: Any) -> None:
        for compare in (True, False):
            state = self.view.optimizer.state
            states.append([value.clone() for of in state.values() for value in of.values() if torch.is_tensor(value)])
            if compare:
                run(self, step)

    monkeypatch.setattr(Cases, "run", noted)
    again = rerun(folder, 2, {"learning_rate": 1e-3}, model=tiny_model().bfloat16(), **settings)
    assert again.comparison.verdict == "same bits"
    before, after = states
    assert torch.float32 in {value.dtype for value in before}
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(before, after, strict=True))


# ---- Rewards and a teacher ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_weights_and_scales_may_be_written_as_in_trl(tmp_path):
    folder = trained(tmp_path / "run", reward=letters)
    cases: list[dict[str, Any]] = [{"reward_weights": None}, {"scale_rewards": True}, {"scale_rewards": False}]
    again = rerun(folder, 2, *cases, reward=letters)
    default, group, none = again.cases
    assert default["gradient"][ALL]["difference"] == group["gradient"][ALL]["difference"] == 0.0
    assert none["gradient"][ALL]["difference"] > 0


def test_a_teacher_has_a_coefficient(tmp_path):
    trainer = make(tmp_path / "run", **RUN, teacher_model=tiny_model())
    with pytest.raises(ConfigError, match="teacher_kl_coef=None cannot be a case of a step: it is a number with"):
        trainer.rerun(2, cases=[{"teacher_kl_coef": None}])


# ---- What is logged and written -------------------------------------------------------------------------------------


class _Logs(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        self._metrics["train"]["squared"].append(float(loss.detach()) ** 2 + self.args.epsilon)
        self._logs.setdefault("losses", []).append(float(loss.detach()))
        return loss


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param((), marks=pytest.mark.full, id="record"),
        pytest.param(({"epsilon": 0.5}, {"loss_type": "dr_grpo"}), id="cases"),
    ],
)
def test_what_a_loss_logs_is_that_of_the_step_alone(tmp_path, cases):
    changes = {"max_steps": 3, "cls": _Logs}  # the last step has a second line
    folder = trained(tmp_path / "run", **changes)
    trainer = make(folder, **{**RUN, **changes})
    again = trainer.rerun(2, gradients=True, cases=cases)
    of_run, of_rerun = (
        [line["values"].get("squared") for line in read_record(part).entries if line["step"] == 2]
        for part in (folder, again.folder)
    )
    assert of_run == of_rerun[:1]  # and a line at the end
    assert of_run[0] is not None
    assert len(trainer._logs["losses"]) == 2  # micro-batches


@pytest.mark.parametrize(("loss", "known"), [("sapo", False), pytest.param("grpo", True, marks=pytest.mark.full)])
def test_a_loss_without_a_clip_has_no_clipped_tokens(tmp_path, loss, known):
    folder = trained(tmp_path / "run", loss_type=loss)
    again = rerun(folder, 2, {"epsilon": 0.5}, loss_type=loss)
    assert all((row["tokens"]["clipped"] is not None) == known for row in rows_of(again))
    assert ("the clip never binds" in again.cases[0]["text"]) == known
    assert "no difference" in again.cases[0]["text"]


@pytest.mark.parametrize(("loss", "epsilon"), [("cispo", 50.0), ("grpo", 50.0)])
@pytest.mark.full
def test_a_clip_of_each_loss_that_never_binds_is_said(tmp_path, loss, epsilon):
    changes = {**TWICE, "loss_type": loss, "epsilon": epsilon, "epsilon_high": epsilon}
    folder = trained(tmp_path / "run", **changes)
    [compared] = rerun(folder, 2, {"epsilon": 2 * epsilon, "epsilon_high": 2 * epsilon}, **changes).cases
    assert "the clip never binds in this step" in compared["text"]


def test_a_difference_within_the_noise_of_the_step_is_none():
    figures = {ALL: {"cosine": 1.0, "ratio": 1.0, "difference": 1e-7}}
    compared = {"title": "t", "case": {"beta": 0.1}, "gradient": figures, "update": figures, "values": {"loss": [1, 2]}}
    noise = {"gradient": 6e-8, "update": 6e-8}
    same = case_text(compared | {"noise": noise}, [])
    assert same == "t: no difference: gradient and update are the same up to rounding in this step"
    assert "no difference" not in case_text(compared | {"noise": noise | {"update": 4e-8}}, [])
    unlogged = case_text(compared | {"values": {"loss": [1, 1]}, "noise": noise | {"update": 4e-8}}, [])
    assert unlogged.startswith("t: no logged value differs\n")
    unknown = {ALL: {"cosine": math.nan, "ratio": 1.0, "difference": math.nan}}
    assert "no difference" not in case_text(compared | {"noise": noise, "update": unknown}, [])
