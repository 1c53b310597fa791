"""fp16 with the real loss scaler, on the CPU; numbers that are not finite.

A token whose logit is -inf, as a bias of the head bans it, is one of probability 0; entropies of NaN end a run.
"""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ModelError, PrecisionError
from grpo_ext.precision.loss_scaler import LossScaler
from tests.support.rollouts import give_completions
from tests.support.tiny import tiny_model
from tests.support.trainers import SAVE, Overflow, change, error, log_of, make, native_fp16, on, parameters, ran

ROWS = [[10 + (7 * row + 3 * i) % 30 for i in range(6)] for row in range(16)]


@pytest.fixture
def fp16_on_the_cpu(monkeypatch):
    monkeypatch.setattr(accelerate.Accelerator, "__init__", native_fp16(accelerate.Accelerator.__init__))


def build(folder: Path, model: Any = "qwen2", **settings: Any) -> GRPOTrainer:
    return make(folder, model, **{"fp16": True, "max_steps": 2, **settings})


def overflowing(folder: Path, *overflows: int, scale: float = 2.0**16, **settings: Any) -> GRPOTrainer:
    trainer = build(folder, callbacks=[Overflow(*overflows)], **settings)
    trainer.accelerator.scaler.value = scale
    return trainer


def test_it_computes_in_float16_and_learns_about_the_same(tmp_path, fp16_on_the_cpu):
    seen = set()
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    once = {"max_steps": 1, "optim": "sgd", "rollout_chunk_size": 8}  # so that the update is the gradient
    trainer = build(tmp_path / "half", model, **once)
    give_completions(trainer, ROWS)  # sampled in float16, some tokens would be others
    half = change(trainer)
    assert isinstance(trainer.accelerator.scaler, LossScaler)
    assert torch.float16 in seen
    full = build(tmp_path / "full", fp16=False, **once)
    give_completions(full, ROWS)
    whole = change(full)
    assert 0 < error(whole, half) < 0.02
    line = trainer.state.log_history[0]
    assert line["fp16/loss_scale"] == 65536.0
    assert line["fp16/skipped_steps"] == line["fp16/overflows"] == 0.0


def test_a_skipped_step_moves_nothing_but_the_scale(tmp_path, fp16_on_the_cpu):
    trainer, rates, weights = overflowing(tmp_path, 1, 2, max_steps=4, scale=1024.0), [], []
    trainer.add_callback(on("on_step_end", lambda state: rates.append(trainer.lr_scheduler.get_last_lr()[0])))
    trainer.add_callback(on("on_step_end", lambda state: weights.append(parameters(trainer))))
    trainer.train()
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert rates[0] == rates[1] == rates[2] > rates[3]
    lines = [line for line in trainer.state.log_history if "fp16/loss_scale" in line]
    assert [line["fp16/loss_scale"] for line in lines] == [1024.0, 1024.0, 512.0, 512.0]
    assert [line["fp16/overflows"] for line in lines] == [0.0, 1.0, 1.0, 0.0]
    assert [line["fp16/skipped_steps"] for line in lines] == [0.0, 1.0, 2.0, 2.0]


def test_gradients_that_overflow_for_good_end_in_a_clear_error(tmp_path, fp16_on_the_cpu):
    trainer = overflowing(tmp_path, *range(100), max_steps=100, scale=4.0)
    before = parameters(trainer)
    with pytest.raises(PrecisionError, match=r"loss scale of 1, its minimum; 4 of 4 steps were skipped"):
        trainer.train()
    assert torch.equal(parameters(trainer), before)


def test_the_scale_is_resumed(tmp_path, fp16_on_the_cpu):
    save = {**SAVE, "max_steps": 3}
    whole = ran(overflowing(tmp_path / "out", 0, 1, **save))
    again = ran(build(tmp_path / "out", **save), tmp_path / "out" / "checkpoint-2")
    assert again.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert whole.accelerator.scaler.skipped == 2
    assert torch.equal(parameters(whole), parameters(again))


def test_a_forward_that_overflows_names_its_module_and_is_no_matter_of_the_scale(tmp_path, fp16_on_the_cpu):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(60000.0)  # finite; its products are not, in float16
    trainer = build(tmp_path, model)
    before = parameters(trainer)
    with pytest.raises(PrecisionError, match=r"layers\.1\.mlp\.down_proj \(Linear\).*no loss scale can fix"):
        trainer.train()
    assert torch.equal(parameters(trainer), before)


def test_a_weight_that_is_not_finite_is_named_in_any_precision(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    trainer = build(tmp_path, model, fp16=False)
    give_completions(trainer, ROWS)  # sampling would stop before
    with pytest.raises(PrecisionError, match=r"parameter model\.layers\.0\.mlp\.down_proj\.weight is not finite"):
        trainer.train()


def test_weights_in_float16_are_refused(tmp_path, fp16_on_the_cpu):
    with pytest.raises(ModelError, match="is float16; load the model with dtype='float32'"):
        build(tmp_path, tiny_model().half())


def with_banned_tokens(folder: Any, banned: float) -> tuple[list[torch.Tensor], list[float]]:
    """The weights of a model whose head's bias bans two tokens, after a step, and the entropy that it logs."""
    model = tiny_model()
    bias = torch.zeros(model.config.vocab_size).index_fill(0, torch.tensor([4, 9]), banned)
    model.lm_head.bias = torch.nn.Parameter(bias)
    trainer = ran(make(folder, model, top_entropy_quantile=0.4, max_steps=2))
    assert trainer._forwards.choice.form(model) == "packed"
    return [p.detach() for name, p in model.named_parameters() if name != "lm_head.bias"], log_of(trainer, "entropy")


def test_a_banned_token_is_trained_as_one_of_probability_zero(tmp_path):
    expected, entropies = with_banned_tokens(tmp_path / "a", -1e4)
    weights, ours = with_banned_tokens(tmp_path / "b", -torch.inf)
    assert all(map(torch.equal, weights, expected))
    assert ours == entropies
    allowed, _ = with_banned_tokens(tmp_path / "c", 0.0)
    assert not all(map(torch.equal, allowed, expected))


class SomeNaN(GRPOTrainer):
    """A user's scores, in which the entropy of one token of each completion is unknown."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if entropies is not None:
            entropies = entropies.clone()
            entropies[:, 0] = torch.nan
        return logps, entropies, aux_loss


@pytest.mark.parametrize("quantile", [0.1, 0.9])
def test_entropies_that_cannot_be_compared_end_the_run(tmp_path, quantile):
    with pytest.raises(PrecisionError, match=r"top_entropy_quantile=0\.\d .* 16 of \d+ are NaN"):
        make(tmp_path, cls=SomeNaN, top_entropy_quantile=quantile).train()
