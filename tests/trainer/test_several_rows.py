"""Rollouts of several rows: the update is that of a plain loop over rows, in float64."""

import copy
import itertools
from typing import Any

import pytest
import torch

from tests.support.float64 import float64_throughout
from tests.support.several_rows import (
    Agent,
    Plain,
    Row,
    each_row_a_rollout,
    equal_calls_once,
    last_rows,
    plain_change,
    shared_twice,
    with_advantages,
)
from tests.support.tiny import prompts, tiny_model
from tests.support.trainers import batches_of, change, error, log_of, make, parameters

PLAIN = 1e-12  # measured: 2e-15 to 1e-14
MISTAKE = 1e-2
SEQUENCE = {"importance_sampling_level": "sequence"}
EXTRA = {"beta": 0.3, "entropy_coef": 0.2}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {},
    "dr_grpo": {},
    "gspo": {"loss_type": "grpo", **SEQUENCE},
    "luspo": SEQUENCE,
    "vespo": {},
    "cispo": {"epsilon_high": 1.5},
    "sapo": {},
    "prompt_mean": {"loss_type": "dapo", "loss_aggregation": "prompt_mean"},
    "load balance": {"loss_type": "grpo", "router_aux_loss_coef": 2.0},
    "entropy quantile": {"loss_type": "grpo", "top_entropy_quantile": 0.5},
    "sequence mask": {"loss_type": "dapo", "sequence_mask_low": 0.95},
    "off-policy mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.02},
    "dapo, sequence": {"loss_type": "dapo", **SEQUENCE, "use_bias_correction_kl": False},
}
FORMS: list[dict[str, Any]] = [
    {"forward": form, **sizes}
    for form in ("packed", "prefix", "padded")
    for sizes in ({"per_device_train_batch_size": 12}, {"per_device_train_batch_size": 3}, {"micro_batch_tokens": 30})
]
SEVERAL = {"train_dataset": prompts(16), "num_generations": 4, "global_batch_size": 12}


def settings_of(cfg: Plain) -> dict[str, Any]:
    """The same settings for a trainer that takes steps of SGD."""
    known = {name: value for name, value in vars(cfg).items() if value not in (None, float("inf"))}
    sgd = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    return {**SEVERAL, **sgd, "advantage_estimator": "group_centered", **known}


def update_of(folder: Any, cfg: Plain, agent: Agent, steps: int, **settings: Any) -> tuple[Any, torch.Tensor, Any]:
    """A model in float64, what so many steps on one rollout batch change in it, and the trainer."""
    own = {"reward": agent.reward, "rollout_func": agent, "num_iterations": steps, "max_steps": steps}
    with float64_throughout(tiny_model("moe" if cfg.router_aux_loss_coef else "qwen2")) as model:
        start = copy.deepcopy(model)
        trainer = make(folder, model, **{**settings_of(cfg), **own, **settings})
        return start, change(trainer), trainer


def cases() -> list[Any]:
    """Some losses off policy, each in another layout; with --full all, in every form, on policy too."""
    few = {("grpo", 2, 2), ("load balance", 1, 2)}
    short = {*few, ("gspo", 5, 2), ("vespo", 8, 2)}
    every = [
        (loss, form, steps)
        for (place, loss), form, steps in itertools.product(enumerate(LOSSES), range(len(FORMS)), (1, 2))
        if (form // 3 + form + place) % 3 == 0 or (loss, form, steps) in short
    ]
    return [pytest.param(*case, marks=() if case in few else pytest.mark.full, id=str(case)) for case in every]


@pytest.mark.parametrize(("loss", "form", "steps"), cases())
def test_the_update_is_that_of_a_plain_loop_over_rows(tmp_path, loss, form, steps):
    cfg, agent = Plain(**{"loss_type": loss, **EXTRA, **LOSSES[loss]}), Agent()
    start, found, _ = update_of(tmp_path, cfg, agent, steps, **FORMS[form])
    with float64_throughout(start):
        expected = plain_change(cfg, start, with_advantages(agent.rollouts), steps)
    print(f"{loss} {FORMS[form]} {steps}: {error(expected, found):.0e}")
    assert error(expected, found) < PLAIN


MISTAKES = {
    "baseline over rows": lambda rollouts: with_advantages(rollouts, by_rows=True),
    "a row as a sequence": lambda rollouts: each_row_a_rollout(with_advantages(rollouts)),
    "equal tokens of two calls once": lambda rollouts: equal_calls_once(with_advantages(rollouts)),
    "a shared token twice": lambda rollouts: shared_twice(with_advantages(rollouts)),
    "the last row alone": lambda rollouts: last_rows(with_advantages(rollouts)),
}


@pytest.mark.parametrize(
    ("loss", "level"), [("grpo", "sequence"), pytest.param("dapo", "token", marks=pytest.mark.full)]
)
def test_a_plain_loop_with_a_mistake_is_another_update(tmp_path, loss, level):
    cfg, agent = Plain(loss_type=loss, importance_sampling_level=level), Agent()
    start, found, trainer = update_of(tmp_path, cfg, agent, 2)
    assert log_of(trainer, "clip_ratio/region_mean")[1] > 0.05
    with float64_throughout(start):
        assert error(plain_change(cfg, start, with_advantages(agent.rollouts), 2), found) < PLAIN
        errors = {
            n: error(plain_change(cfg, start, as_seen(agent.rollouts), 2), found) for n, as_seen in MISTAKES.items()
        }
    print(errors)
    unseen = {"a row as a sequence"} if loss == "dapo" else set()  # a token mean has no sequences
    assert {name for name, off in errors.items() if off < MISTAKE} == unseen


def without_sampled_tokens(rows: list[Row]) -> list[Row]:
    """Further rows: an empty one, one of a tool, and the longest row cut in two that continue each other."""
    place = max(range(len(rows)), key=lambda n: len(rows[n].ids))
    prompt_ids, ids, mask = rows[place]
    half = len(ids) // 2
    cut = [Row(prompt_ids, ids[:half], mask[:half]), Row([*prompt_ids, *ids[:half]], ids[half:], mask[half:])]
    rows = [*rows[:place], *cut, *rows[place + 1 :]]
    return [rows[0], Row([8, 8, 8], [], []), *rows[1:], Row([*prompt_ids, 7], [9], [0])]


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.full), 2])
def test_further_rows_without_a_sampled_token_change_nothing(tmp_path, steps):
    runs = []
    for change_of in (lambda rows: rows, without_sampled_tokens):
        agent = Agent(change=change_of)
        settings = {"rollout_func": agent, "reward": agent.reward, "num_iterations": steps, "max_steps": 4}
        sizes = {"global_batch_size": 8, "rollout_batch_size": 16, "max_completion_length": 24}
        trainer = make(tmp_path / str(len(runs)), **{**SEVERAL, **settings, **sizes})
        batches = batches_of(trainer)
        trainer.train()
        rates = log_of(trainer, "learning_rate"), log_of(trainer, "reward"), log_of(trainer, "num_tokens")
        runs.append((parameters(trainer), torch.cat([b["advantages"] for b in batches]), rates, trainer))
    (weights, advantages, rates, trainer), (other_weights, other_advantages, other_rates, other) = runs
    assert torch.equal(weights, other_weights)
    assert torch.equal(advantages, other_advantages)
    assert rates == other_rates
    assert trainer.state.global_step == other.state.global_step == 4
