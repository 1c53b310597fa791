"""`trainer.rerun(step, cases=[...])`: what other settings make of a step, by hand and by what is known of them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from grpo_ext.algorithms.digests import layer_groups
from grpo_ext.errors import ConfigError
from grpo_ext.run.cases import Cases
from grpo_ext.run.record import STEP
from grpo_ext.step import optimizer_step
from tests.support.case_runs import ALL, CLIPPED, RUN, TWICE, letters, rerun, rows_of, trained
from tests.support.colocated import stand_in
from tests.support.float64 import float64_throughout
from tests.support.selection import few_of
from tests.support.tiny import prompts, sparse_reward, tiny_model, tiny_tokenizer
from tests.support.trainers import LORA, make, passing_on
from tests.tolerances import UPDATE

Figures = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def twice(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("twice") / "run", **TWICE)


LONGER = {"max_steps": 4, "save_steps": 2}  # in whose third step completions have many lengths


@pytest.fixture(scope="module")
def longer(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("longer") / "run", **LONGER)


# ---- By hand --------------------------------------------------------------------------------------------------------


def log_probs(policy: Any, ids: torch.Tensor, answer: int) -> torch.Tensor:
    """Of the last `answer` of these tokens."""
    logits = policy(ids[None], use_cache=False).logits[0, -answer - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[-answer:, None])[:, 0]


def by_hand(model: Any, start: Any, rows: list[dict[str, Any]], **case: Any) -> dict[str, torch.Tensor]:
    """The gradient of a step, completion by completion, with nothing of this package."""
    rule = {"epsilon": 0.05, "beta": 0.1, "loss_type": "grpo", "advantage_estimator": None, **case}
    rewards_PG = torch.tensor([row["rewards"]["letters"] for row in rows]).view(-1, 4)
    leave_one_out = (rewards_PG - rewards_PG.mean(1, keepdim=True)).mul(4).div(3).flatten()
    model.zero_grad()
    for row, alone in zip(rows, leave_one_out.tolist()):
        advantage = alone if rule["advantage_estimator"] else row["advantage"]
        prompt, answer = tiny_tokenizer()(row["prompt"], add_special_tokens=False)["input_ids"], row["tokens"]["ids"]
        logps, reference = (log_probs(part, torch.tensor([*prompt, *answer]), len(answer)) for part in (model, start))
        ratio = (logps - torch.tensor(row["tokens"]["old"], dtype=torch.float64)).exp()
        clipped = ratio.clamp(1 - rule["epsilon"], 1 + rule["epsilon"])
        change = reference.detach() - logps
        kl = (change.exp() - change - 1) * ratio
        loss = -torch.min(ratio * advantage, clipped * advantage) + rule["beta"] * kl
        whole = loss.mean() if rule["loss_type"] == "grpo" else loss.sum() / 12
        (whole / len(rows)).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def figures(run: dict[str, torch.Tensor], case: dict[str, torch.Tensor]) -> Figures:
    by_group: dict[str, list[str]] = {ALL: list(run)}
    for name, group in layer_groups(run).items():
        by_group.setdefault(group, []).append(name)
    found = {}
    for group, names in by_group.items():
        one, other = (torch.cat([part[name].flatten() for name in names]) for part in (run, case))
        cosine = torch.cosine_similarity(one, other, dim=0)
        parts = {"cosine": cosine, "ratio": other.norm() / one.norm(), "difference": (one - other).norm() / one.norm()}
        found[group] = {name: float(value) for name, value in parts.items()}
    return found


def assert_same(one: Figures, other: Figures, tolerance: float) -> None:
    assert one.keys() == other.keys()
    for group in one:
        assert one[group] == pytest.approx(other[group], rel=tolerance, abs=tolerance), group


HAND: list[dict[str, Any]] = [
    {"epsilon": 0.2},
    {"loss_type": "dr_grpo", "beta": 0.02},
    {"beta": 0.0, "learning_rate": 0.5},
    {"advantage_estimator": "leave_one_out", "max_grad_norm": 0.3},
]


def test_gradients_and_updates_are_those_made_by_hand(tmp_path):
    settings = {**TWICE, "max_steps": 2, "beta": 0.1, "epsilon": 0.05, "save_strategy": "no", "reward": letters}
    settings |= {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.2}
    with float64_throughout(tiny_model()):
        start, model = tiny_model().double(), tiny_model().double()
        trained(tmp_path / "run", model=tiny_model().double(), **settings)
        rerun(tmp_path / "run", 1, model=model, **settings)  # has the weights that the second step starts from
        sizes = {"per_device_train_batch_size": 3}
        again = rerun(tmp_path / "run", 2, *HAND, model=tiny_model().double(), **settings, **sizes)
        rows = rows_of(again)
        run = by_hand(model, start, rows)

        def update(gradient: dict[str, torch.Tensor], rate: float = 0.1, most: float = 0.2) -> dict[str, torch.Tensor]:
            norm = math.hypot(*(float(part.norm()) for part in gradient.values()))
            return {name: -rate * min(1.0, most / (norm + 1e-6)) * part for name, part in gradient.items()}

        for case, compared in zip(HAND, again.cases, strict=True):
            gradient = by_hand(model, start, rows, **case)
            assert_same(compared["gradient"], figures(run, gradient), 1e-9)
            moved = update(gradient, case.get("learning_rate", 0.1), case.get("max_grad_norm", 0.2))
            assert_same(compared["update"], figures(update(run), moved), 1e-9)
            assert compared["gradient"][ALL]["cosine"] < 0.9999  # the control: each case matters
    assert again.cases[0]["values"][CLIPPED][0] > again.cases[0]["values"][CLIPPED][1] > 0


# ---- What is known of settings --------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_clip_that_never_binds_makes_no_difference_and_one_that_binds_does(longer, twice):
    [never] = rerun(longer, 3, {"epsilon": 0.01, "epsilon_high": 0.01}, **LONGER).cases
    assert never["gradient"][ALL]["difference"] == never["update"][ALL]["difference"] == 0.0
    assert "no difference: the clip never binds in this step" in never["text"]
    [binds, same] = rerun(twice, 2, {"epsilon": 0.01}, {"epsilon": 0.2}, **TWICE).cases
    assert binds["gradient"][ALL]["difference"] > 0
    assert binds["values"][CLIPPED][1] > binds["values"][CLIPPED][0]
    assert "no difference: gradient and update are the same" in same["text"]  # where tokens are clipped


def test_the_opposite_rewards_give_the_opposite_gradient(tmp_path):
    folder = trained(tmp_path / "run", scale_rewards="none")
    opposite, double = {"reward_weights": [-1.0]}, {"reward_weights": [2.0]}
    for compared, sign, ratio in zip(rerun(folder, 2, opposite, double, scale_rewards="none").cases, (-1, 1), (1, 2)):
        assert compared["gradient"][ALL]["cosine"] == pytest.approx(sign, abs=1e-9)
        assert compared["gradient"][ALL]["ratio"] == pytest.approx(ratio, rel=1e-6)


def test_grpo_and_dr_grpo_weight_tokens_by_length_as_arithmetic_says(longer):
    again = rerun(longer, 3, {"loss_type": "dr_grpo"}, **LONGER)
    rows = rows_of(again)
    assert len({len(row["tokens"]["ids"]) for row in rows}) > 2
    for row in rows:
        for before, change in zip(row["tokens"]["coefficient"], row["cases"]["loss_type=dr_grpo"], strict=True):
            assert change == pytest.approx(before * (len(row["tokens"]["ids"]) / 12 - 1), rel=1e-5, abs=1e-9)
    assert again.cases[0]["gradient"][ALL]["ratio"] < 1


def test_rates_scale_updates_alone(twice):
    cases = {"learning_rate": 3e-2}, {"max_grad_norm": 1e-3}, {"adam_epsilon": 1e-2}
    faster, clipped, damped = rerun(twice, 2, *cases, **TWICE).cases
    for compared in (faster, clipped, damped):
        assert compared["gradient"][ALL]["difference"] == 0.0
    assert faster["update"][ALL]["ratio"] == pytest.approx(3.0, rel=1e-5)
    assert faster["update"][ALL]["cosine"] == pytest.approx(1.0, abs=1e-9)
    assert clipped["update"][ALL]["difference"] > 0
    assert damped["update"][ALL]["ratio"] < 0.9


def test_masks_are_counted(twice):
    [compared] = rerun(twice, 2, {"sequence_mask_low": 0.99}, **TWICE).cases
    before, after = compared["values"]["sequence_mask/left_out"]
    assert before is None or math.isnan(before)
    assert after > 0.2


SEVERAL = ({"epsilon": 0.05}, {"loss_type": "dapo", "beta": 0.02}, {"scale_rewards": "batch"}, {"learning_rate": 1e-3})


@pytest.mark.parametrize("layout", [{"per_device_train_batch_size": 16}, {"forward": "padded"}], ids=str)
@pytest.mark.full
def test_another_layout_gives_the_same_figures(tmp_path, layout):
    folder = trained(tmp_path / "run", **TWICE, beta=0.1)
    pair = [
        rerun(folder, 2, *SEVERAL, **TWICE, beta=0.1, **sizes).cases
        for sizes in ({"per_device_train_batch_size": 3}, layout)
    ]
    for one, other in zip(*pair, strict=True):
        for what in ("gradient", "update"):
            assert_same(one[what], other[what], UPDATE)
        assert one["values"] == {
            name: pytest.approx(pair, rel=1e-4, abs=1e-6) for name, pair in other["values"].items()
        }


# ---- The step as it was ---------------------------------------------------------------------------------------------

DROPOUT = LoraConfig(**LORA, lora_dropout=0.2, init_lora_weights=False)
KINDS: dict[str, dict[str, Any]] = {
    "bits": {"bitwise_invariant": True, **TWICE},
    "dropout": {"peft_config": DROPOUT, **TWICE},
    "half precision": {"bf16": True},
    "adaptive entropy": {
        **{"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef": 0.1},
        **{"entropy_coef_delta": 0.5, "entropy_coef_max": 5.0},
    },
    "own loss": {"cls": passing_on("compute_loss", "_compute_loss"), **TWICE},
    "own scores": {"cls": passing_on("_generate_and_score_completions", "training_step", "create_optimizer")},
    "dynamic sampling": {"dynamic_sampling": True, "reward": sparse_reward},
    "lag": {"rollout_lag": 1, **LONGER},
    "several steps": {"rollout_batch_size": 32, "max_steps": 3, "save_steps": 2},
    "quantile": {"top_entropy_quantile": 0.5},
}


@pytest.mark.parametrize("kind", few_of(KINDS, ("bits", "adaptive entropy")))
def test_the_settings_of_the_run_make_no_difference_and_the_step_is_the_same_afterwards(tmp_path, kind):
    changes = {**RUN, **KINDS[kind]}
    folder = trained(tmp_path / "run", **changes)
    again = rerun(
        folder, 4 if changes["max_steps"] > 3 else 2, {"loss_type": "grpo"}, {"scale_rewards": "none"}, **changes
    )
    assert again.comparison.verdict == "same bits", again.text
    assert "weights were not compared" not in again.text
    same, other = again.cases
    assert same["gradient"][ALL]["difference"] == same["update"][ALL]["difference"] == 0.0
    assert same["noise"] == {"gradient": 0.0, "update": 0.0}
    assert other["gradient"][ALL]["difference"] > 0


def test_the_update_of_the_run_is_the_one_that_its_optimizer_makes(twice, monkeypatch):
    made, run = list[Any](), Cases._run

    def noted(self: Cases, attributes: Any, batch: Any) -> Any:
        before = {name: weight.detach().clone() for name, weight in self.weights.items()}
        made.append((before, run(self, attributes, batch)))
        return made[-1][1]

    monkeypatch.setattr(Cases, "_run", noted)
    trainer = make(twice, **RUN, **TWICE)
    trainer.rerun(2, cases=[{"epsilon": 0.01}])
    before, of_run = made[0]
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[name] - before[name], of_run.update[name]) for name in after)
    assert all(torch.equal(before[name], made[1][0][name]) for name in after)  # each case begins with the same weights


def test_the_masks_of_dropout_are_those_of_the_step(tmp_path, monkeypatch):
    """The control: where the step draws others a second time, that is said."""
    changes = {"peft_config": DROPOUT}
    folder, calls, derived = trained(tmp_path / "run", **changes), [], optimizer_step.derive_key

    def another(*parts: int) -> int:
        calls.append(parts)
        return derived(*parts[:-1], parts[-1] + len(calls))

    monkeypatch.setattr(optimizer_step, "derive_key", another)
    [compared] = rerun(folder, 2, {"epsilon": 0.1}, **changes).cases
    assert "not compared: the gradient of the step differs by" in compared["text"]
    assert {parts[-1] for parts in calls} >= {2}


@pytest.mark.full
def test_a_step_of_a_vllm_run_has_cases_and_its_corrections_are_those_of_the_run(tmp_path, monkeypatch):
    stand_in(monkeypatch.setattr)
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_check": False, "max_steps": 2}
    folder = trained(tmp_path / "run", **engine)
    same, scaled = rerun(folder, 2, {"loss_type": "grpo"}, {"loss_type": "luspo"}, **engine).cases
    assert same["gradient"][ALL]["difference"] == 0.0
    assert scaled["gradient"][ALL]["ratio"] > 2
    with pytest.raises(ConfigError, match="vllm_importance_sampling_correction=False cannot be a case"):
        rerun(folder, 2, {"vllm_importance_sampling_correction": False}, **engine)


# ---- Refused --------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "completions": (
        {"temperature": 0.5},
        r"temperature=0\.5 cannot be a case of a step: a case has the step's completions",
    ),
    "prompts": ({"num_generations": 2}, "num_generations=2 cannot be a case"),
    "sizes": ({"global_batch_size": 8}, "global_batch_size=8 cannot be a case"),
    "truncated": ({"mask_truncated_completions": True}, "mask_truncated_completions=True cannot be a case"),
    "optimizer": ({"optim": "sgd"}, "optim='sgd' cannot be a case"),
    "schedule": ({"warmup_steps": 3}, "warmup_steps=3 cannot be a case"),
    "layout": ({"per_device_train_batch_size": 3}, "per_device_train_batch_size=3 cannot be a case"),
    "reference": ({"beta": 0.1}, "beta=0.1 cannot be a case of a step: the run has beta=0, and so no reference"),
    "weights": ({"reward_weights": [1.0, 2.0]}, "give one weight for each reward function"),
    "weight": ({"reward_weights": 0.5}, r"reward_weights=0\.5 cannot be .*: give one weight for each reward function"),
    "teacher": ({"teacher_kl_coef": 0.5}, r"teacher_kl_coef=0\.5 cannot be a case of a step: .* None without one"),
    "decay": ({"weight_decay": 0.1}, "weight_decay=0.1 cannot be a case"),
    "name": ({"epsilon_hihg": 0.3}, "did you mean 'epsilon_high'"),
    "value": ({"epsilon": -1}, "epsilon=-1: use 0 or more"),
    "kind": ({"epsilon": "0.3"}, "is text, and takes float"),
    "contradiction": ({"trust_region": "tv"}, "set both or neither"),
    "loss": ({"loss_type": "gpro"}, "loss_type"),
    "nothing": ({}, r"cases: \{\} is not a mapping from names"),
    "no name": ({3: 4}, "cases: {3: 4} is not a mapping from names"),
    "no rate": ({"learning_rate": None}, "learning_rate"),
    "infinite rate": ({"learning_rate": math.inf}, "learning_rate=inf: use 0 or more"),
}


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Any:
    return make(tmp_path_factory.mktemp("untrained") / "run", **RUN)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_a_case_says_why_before_anything_runs(untrained, kind):
    case, message = REFUSED[kind]
    with pytest.raises(ConfigError, match=message):
        untrained.rerun(2, cases=[{"epsilon": 0.1}, case])


def test_cases_are_a_list(untrained):
    with pytest.raises(ConfigError, match="cases: 'epsilon' is not a mapping"):
        untrained.rerun(2, cases={"epsilon": 0.3})


def test_with_dynamic_sampling_rewards_decide_completions(tmp_path):
    trainer = make(tmp_path / "run", **RUN, dynamic_sampling=True, train_dataset=prompts(12))
    with pytest.raises(ConfigError, match="with dynamic_sampling it decides completions"):
        trainer.rerun(2, cases=[{"reward_weights": [2.0]}])


# ---- What is written ------------------------------------------------------------------------------------------------


def test_the_text_and_the_file_say_what_differs_and_where(twice):
    again = rerun(twice, 2, {"epsilon": 0.02}, {"adam_epsilon": 1e-4}, **TWICE)
    about = json.loads((again.folder / STEP).read_text().splitlines()[0])
    assert about["cases"] == json.loads(json.dumps(again.cases))
    assert about["text"] == again.text
    changed, same = again.cases
    assert again.text.endswith(f"{changed['text']}\n{same['text']}")
    columns, cases = ([row[name] for row in rows_of(again)] for name in ("tokens", "cases"))
    changes = [[abs(change) for change in row["epsilon=0.02"]] for row in cases]
    sizes = [math.fsum(row) for row in changes]
    most = max(range(len(sizes)), key=sizes.__getitem__)
    token = columns[most]["text"][changes[most].index(max(changes[most]))]
    completion = rows_of(again)[most]["completion"]
    assert f"  {sizes[most] / sum(sizes):.0%} of the difference: {completion!r}, most {token!r}" in changed["text"]
    assert not any(any(row["adam_epsilon=0.0001"]) for row in cases)
    assert same["text"] == "adam_epsilon=0.0001: no difference: gradient and update are the same in this step"
