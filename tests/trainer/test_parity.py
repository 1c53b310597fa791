"""Parity: on the same completions, one process and one micro-batch, loss and gradients are stock TRL's."""

from __future__ import annotations

import pytest
import torch
import transformers
import trl

import grpo_ext
from grpo_ext.step.statistics import STEP_PART
from tests.support.tiny import letter_reward, prompts, stock_scores, tiny_model, tiny_tokenizer
from tests.support.trainers import make
from tests.tolerances import DIFFERENT, PARITY

STEP = 8  # completions


def trainer_of(package, folder, kind, **settings):
    sizes = {"per_device_train_batch_size": STEP, "global_batch_size": None, "max_steps": 2}
    return make(folder, kind, cls=package.GRPOTrainer, train_dataset=prompts(), **{**sizes, **settings})


def completions(seed: int = 0, old: bool = False, ref: bool = False) -> dict[str, torch.Tensor]:
    """A scored batch as TRL's `_generate_and_score_completions` returns it: ragged, padded on both sides."""
    g = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(2, 7, (STEP,), generator=g)
    lengths = torch.randint(1, 13, (STEP,), generator=g)
    prompt_mask = (torch.arange(7) >= 7 - prompt_lengths[:, None]).long()
    completion_mask = (torch.arange(12) < lengths[:, None]).long()
    batch = {
        "prompt_ids": torch.randint(3, 30, (STEP, 7), generator=g) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(3, 30, (STEP, 12), generator=g) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(STEP, generator=g),
        "num_items_in_batch": completion_mask.sum(),
    }
    if old:
        batch["old_per_token_logps"] = -3.5 + 0.5 * torch.randn(STEP, 12, generator=g)
    if ref:
        batch["ref_per_token_logps"] = -3.5 + 0.5 * torch.randn(STEP, 12, generator=g)
    return batch


def loss_and_gradient(trainer, batch) -> tuple[float, torch.Tensor]:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().double() for p in trainer.model.parameters() if p.grad is not None])


SETTINGS = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.1},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.2, "sapo_temperature_pos": 0.8},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "vespo_other": {
        "loss_type": "vespo",
        **{"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5},
    },
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "delta": {"loss_type": "grpo", "delta": 1.2},
    "kl": {"beta": 0.1},
    "kl_biased": {"beta": 0.1, "use_bias_correction_kl": False},
    "quantile": {"top_entropy_quantile": 0.3},
    "entropy": {"entropy_coef": 0.05},
    "off_policy": {"off_policy_mask_threshold": 0.05},
    "moe": {"kind": "moe"},
}


@stock_scores
@pytest.mark.parametrize(("name", "old"), [("grpo", False), *((name, True) for name in SETTINGS)])
def test_loss_and_gradient_are_those_of_stock_trl(tmp_path, name, old):
    settings = dict(SETTINGS[name])
    kind = settings.pop("kind", "qwen2")
    named = {"model_init_kwargs": None}
    batch = completions(old=old, ref="beta" in settings)
    ours = trainer_of(grpo_ext, tmp_path, kind, **settings)
    beta = settings.pop("beta", 0.0)
    stock = trainer_of(trl, tmp_path, kind, **settings, **named)
    stock.beta = beta  # stock TRL cannot build a reference for a model without a name; the batch brings its log-probs
    loss, gradient = loss_and_gradient(ours, batch)
    stock_loss, stock_gradient = loss_and_gradient(stock, batch)
    assert abs(stock_loss) > 1e-6
    assert loss == pytest.approx(stock_loss, rel=PARITY, abs=PARITY * 1e-1)
    error = float((gradient - stock_gradient).norm() / stock_gradient.norm())
    assert error <= PARITY, f"gradient differs by {error:.2e}"
    metrics, stock_metrics = last_metrics(ours, batch), {k: v[-1] for k, v in stock._metrics["train"].items()}
    assert stock_metrics.keys() - {"entropy_coef"} <= metrics.keys()
    for key in stock_metrics.keys() - {"entropy_coef"}:
        assert metrics[key] == pytest.approx(stock_metrics[key], rel=1e-5, abs=1e-6), key


def last_metrics(trainer, batch) -> dict[str, float]:
    """The metrics of the batch as one step, under the names they are logged with."""
    inputs = trainer._step_planner.as_step(trainer.model, dict(batch), trainer.num_generations, trainer._terms())
    trainer._compute_loss(trainer.model, inputs)
    trainer._log_step(inputs[STEP_PART].context.metrics.reduce())
    return {key: values[-1] for key, values in trainer._metrics["train"].items()}


class Steps(transformers.TrainerCallback):
    """Keeps the completions, the weights and the gradient of every step."""

    def __init__(self, trainer) -> None:
        self.trainer, self.found = trainer, []
        prepare = trainer._prepare_inputs

        def keep(rows):
            rollout = prepare(rows)
            self.found.append([rollout, {k: v.clone() for k, v in trainer.model.state_dict().items()}])
            return rollout

        trainer._prepare_inputs = keep
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, *args, **kwargs) -> None:
        gradients = [p.grad.flatten().double() for p in self.trainer.model.parameters() if p.grad is not None]
        self.found[-1].append(torch.cat(gradients))


def stock_gradient(stock, step, parts: int) -> torch.Tensor:
    """Stock TRL's gradient of a step's completions, accumulated over equal parts."""
    rows, tokens = len(step) // parts, int(step.loss_masks.values.sum())
    # it counts the tokens of the generation batch and takes the step's part of that
    items = torch.tensor(tokens * stock.args.steps_per_generation // parts)
    stock.model.train()
    stock.model.zero_grad()
    stock.current_gradient_accumulation_steps = parts
    for first in range(0, len(step), rows):
        batch = step.select(range(first, first + rows)).collate(0)
        stock.compute_loss(stock.model, batch | {"num_items_in_batch": items}).backward()
    return torch.cat([p.grad.flatten().double() for p in stock.model.parameters() if p.grad is not None])


@stock_scores
@pytest.mark.parametrize(
    ("loss_type", "phase"),
    [
        ("grpo", {"generation_batch_size": 36}),
        ("dapo", {"steps_per_generation": 6}),
    ],
    ids=str,
)
def test_a_step_that_cuts_groups_has_the_gradient_of_stock_trl(tmp_path, loss_type, phase):
    """6 x 3 completions with 4 generations: the second step begins within a group."""
    sizes = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "num_generations": 4, **phase}
    settings = {"loss_type": loss_type, "max_grad_norm": 0.0, "max_steps": 2, **sizes}
    stock = trainer_of(trl, tmp_path, "qwen2", **settings)
    ours = grpo_ext.GRPOTrainer(
        tiny_model(), letter_reward, stock.args, prompts(), processing_class=tiny_tokenizer()
    )  # a plain trl.GRPOConfig
    steps = Steps(ours)
    ours.train()
    assert [len(step) for step, _, _ in steps.found] == [18, 18]
    assert list(steps.found[1][0].groups[:3]) == [4, 4, 5]
    for step, weights, gradient in steps.found:
        stock.model.load_state_dict(weights)
        theirs = stock_gradient(stock, step, parts=3)
        error = float((gradient - theirs).norm() / theirs.norm())
        assert error <= PARITY, f"gradient differs by {error:.2e}"
    # the negative control: advantages of what a step has of its first group are not those of the whole group
    whole = ours._rollouts.batch.advantages.view(-1, 4)
    assert whole.sum(1).abs().max() < 1e-5
    assert whole.any(1).all()
    assert abs(steps.found[1][0].advantages[:2].sum()) > 0.01
    step, weights, gradient = steps.found[1]
    step.advantages[:2] -= step.advantages[:2].mean()
    stock.model.load_state_dict(weights)
    theirs = stock_gradient(stock, step, parts=3)
    assert float((gradient - theirs).norm() / theirs.norm()) > DIFFERENT


@stock_scores
def test_parity_notices_a_wrong_denominator(tmp_path):
    batch = completions()
    _, grpo = loss_and_gradient(trainer_of(grpo_ext, tmp_path, "qwen2", loss_type="grpo"), batch)
    _, stock = loss_and_gradient(trainer_of(trl, tmp_path, "qwen2", loss_type="dapo"), batch)
    assert float((grpo - stock).norm() / stock.norm()) > DIFFERENT
