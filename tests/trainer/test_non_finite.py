"""A step leaves nothing that is not finite: gradients, trained weights, checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo_ext import GRPOTrainer
from grpo_ext.algorithms import losses
from grpo_ext.errors import MemoryShortageError, PrecisionError
from grpo_ext.run.checkpoint import find_checkpoint
from tests.support.rollouts import give_completions
from tests.support.selection import few_of
from tests.support.tiny import prompts
from tests.support.trainers import log_of, make, on, other, parameters, ran, signals

ROWS = [[10 + (7 * row + 3 * i) % 30 for i in range(6)] for row in range(16)]


def with_bad_gradient(loss: torch.Tensor) -> torch.Tensor:
    """The same loss, whose gradient is 0 times infinity."""
    return loss + 0 * (loss - loss.detach()).sqrt()


class OwnLoss(GRPOTrainer):
    """A user's loss whose gradient is NaN from the third step on, where one of these completions is in the batch."""

    bad = (ROWS[5], ROWS[11])

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        here = any(row in self.bad for row in inputs["completion_ids"].tolist())
        return with_bad_gradient(loss) if here and self.state.global_step == 2 else loss


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*checkpoint-*"))


def varied(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs within every group of the rows above."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


BUDGET = {"micro_batch_tokens": 60}
EACH = few_of([{}, {"max_grad_norm": 0.0}, {"trail": False}, BUDGET], [BUDGET])


@pytest.mark.parametrize("settings", EACH, ids=str)
def test_a_gradient_that_is_not_finite_ends_the_run_before_a_weight_moves(tmp_path, settings):
    trainer = other(tmp_path, reward=varied, cls=OwnLoss, max_steps=4, save_total_limit=1, **settings)
    give_completions(trainer, ROWS)
    weights: list[torch.Tensor] = []
    trainer.add_callback(on("on_step_begin", lambda state: weights.append(parameters(trainer))))
    named = r"gradient of step 3 is nan: it comes from the completions \[5, 11\] .* \(prompts \[1, 2\] .* the model "
    with pytest.raises(PrecisionError, match=named):
        trainer.train()
    assert torch.equal(weights[-1], parameters(trainer))
    assert not torch.equal(weights[0], weights[-1])
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert find_checkpoint("latest", str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])["ended"] == "failed"


def test_the_first_module_below_the_loss_is_named(tmp_path):
    trainer = make(tmp_path, reward=varied)
    give_completions(trainer, ROWS)

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> Any:
        return with_bad_gradient(output.clone())

    trainer.model.model.layers[1].mlp.register_forward_hook(spoil)
    with pytest.raises(
        PrecisionError, match=r"first seen at the output of model\.layers\.1\.mlp\.down_proj \(Linear\)"
    ):
        trainer.train()


class Huge(GRPOTrainer):
    """Gradients whose squares overflow float32; they do not."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs) * 1e28


def test_a_norm_that_overflows_ends_the_run(tmp_path):
    trainer = make(tmp_path, cls=Huge)
    before = parameters(trainer)
    with pytest.raises(PrecisionError, match=r"step 1 is inf: it is not seen at the output of a module"):
        trainer.train()
    assert torch.equal(parameters(trainer), before)


def test_in_bitwise_mode_the_run_ends_too(tmp_path):
    trainer = other(tmp_path, reward=varied, cls=OwnLoss, max_steps=4, bitwise_invariant=True, canonical_unit_size=4)
    give_completions(trainer, ROWS)
    with pytest.raises(PrecisionError, match=r"the gradient of .* is not finite"):
        trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def old_scores_less(amount: float, sign: int) -> Any:
    """A subclass whose old log-probabilities are far below those of the policy, where the advantage has this sign."""

    def score(self: Any, inputs: Any) -> Any:
        scored = GRPOTrainer._generate_and_score_completions(self, inputs)
        chosen = (scored["advantages"] * sign > 0)[:, None]
        scored["old_per_token_logps"] = scored["old_per_token_logps"] - amount * chosen
        return scored

    return type("Far", (GRPOTrainer,), {"_generate_and_score_completions": score})


REUSED = {"num_iterations": 2, "max_steps": 2}


@pytest.mark.parametrize("loss_type", few_of(["grpo", "sapo"], ["sapo"]))
def test_ratios_that_overflow_train_as_ratios_beyond_the_clip_do(tmp_path, monkeypatch, loss_type):
    settings = {**REUSED, "loss_type": loss_type}
    far = ran(make(tmp_path / "far", cls=old_scores_less(150.0, 1), **settings))
    clipped = ran(make(tmp_path / "clipped", cls=old_scores_less(50.0, 1), **settings))
    assert torch.equal(parameters(far), parameters(clipped))
    assert all(map(math.isfinite, log_of(far, "grad_norm")))
    monkeypatch.setattr(losses, "_LARGEST_LOG_RATIO", math.inf)
    with pytest.raises(PrecisionError, match=r"gradient of step 1 is nan: it comes from the completions \[\d+"):
        make(tmp_path / "without", cls=old_scores_less(150.0, 1), **settings).train()


def test_ratios_that_explode_end_the_run(tmp_path):
    with pytest.raises(PrecisionError, match="the loss of step 1 is inf: every module's output is finite"):
        make(tmp_path, cls=old_scores_less(150.0, -1), loss_type="grpo", **REUSED).train()


class Explode(TrainerCallback):
    """Makes the learning rate of a step infinite: the optimizer itself spoils the weights."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            for group in optimizer.param_groups:
                group["lr"] = math.inf


SPOILED = r"after step 2 trained weights are not finite, \S+ and \d+ others"
PATHS: dict[str, dict[str, Any]] = {
    "saves": {"max_steps": 4},
    "the last step": {"max_steps": 2},
    "an interrupt": {"max_steps": 4, "save_steps": 100, "callbacks": [signals(1, 2)]},
    "no saves": {"max_steps": 2, "save_strategy": "no"},
    "an epoch": {"num_train_epochs": 1, "max_steps": -1, "save_strategy": "epoch", "train_dataset": prompts(8)},
    "the best": {"max_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss"},
}


@pytest.mark.parametrize("path", few_of(PATHS, ("an interrupt", "the best")))
def test_weights_that_are_not_finite_are_written_on_no_path(tmp_path, path):
    settings = {"save_total_limit": 1, **PATHS[path]}
    if path == "the best":
        settings |= {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(4)}
    trainer = other(tmp_path, **{**settings, "callbacks": [*settings.get("callbacks", ()), Explode(1)]})
    with pytest.raises(PrecisionError, match=SPOILED):
        trainer.train()
    assert checkpoints(tmp_path) == ([] if path in ("an interrupt", "no saves", "an epoch") else ["checkpoint-1"])


def test_a_failed_evaluation_saves_no_such_weights(tmp_path):
    trainer = other(tmp_path, callbacks=[Explode(1)], eval_strategy="steps", eval_steps=2, eval_dataset=prompts(4))
    with pytest.raises(PrecisionError, match=SPOILED) as failure:
        trainer.train()
    assert failure.value.__context__ is not None  # that of the evaluation
    assert checkpoints(tmp_path) == ["checkpoint-1"]


def test_weights_that_were_infinite_at_the_start_are_trained_and_saved(tmp_path):
    trainer = other(tmp_path, max_steps=2)
    bias = torch.zeros(trainer.model.config.vocab_size).index_fill(0, torch.tensor([4, 9]), -torch.inf)
    trainer.model.lm_head.bias = torch.nn.Parameter(bias)
    trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2"]


class Short(GRPOTrainer):
    """A loss that is not finite; memory runs out where it is run again to find the cause."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("out of memory: planted")
        return super().compute_loss(model, inputs, *args, **kwargs) * math.inf


def test_memory_that_runs_out_while_a_cause_is_looked_for_is_named(tmp_path):
    with pytest.raises(MemoryShortageError, match=r"to find what is not finite, does not .out of memory: planted"):
        make(tmp_path, cls=Short).train()
