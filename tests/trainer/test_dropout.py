"""Dropout through the trainer: the update does not depend on the split, and what cannot be followed is refused."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trl
from peft import LoHaConfig, LoKrConfig, LoraConfig
from torch import nn
from transformers import TrainerCallback
from trl import ModelConfig, get_peft_config

from grpo_ext import GRPOTrainer
from grpo_ext.errors import CheckpointError, ModelError, SplitDependentError
from tests.support.architectures import architecture
from tests.support.selection import few_of
from tests.support.tiny import prompts, tiny_model
from tests.support.trainers import LORA, SAVE, error, make, on, ran, trained, update
from tests.tolerances import DIFFERENT, UPDATE

RATE = {"lora_dropout": 0.1, "init_lora_weights": False}
# An element of these adapters' gradients carries up to 1.4e-7 of rounding, too much for an Adam step: see ADAM_EPSILON.
SGD = {"optim": "sgd", "learning_rate": 0.3}


def lora(**changes: Any) -> dict[str, Any]:
    return {"peft_config": LoraConfig(**{**LORA, **RATE, **changes}), **SGD}


def gpt2(**rates: float) -> dict[str, Any]:
    return {"model": tiny_model("gpt2", **{"resid_pdrop": 0.1, "embd_pdrop": 0.1, **rates})}


def hybrid() -> dict[str, Any]:
    return {"model": architecture("lfm2"), **lora(target_modules=["q_proj", "w1"])}


def with_head() -> dict[str, Any]:
    """The whole block in `modules_to_save` has dropout too."""
    return {"model": tiny_model("gpt2", resid_pdrop=0.1), **lora(target_modules=["c_attn"], modules_to_save=["mlp"])}


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
CASES: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "lora": (lora, {}),
    "lora padded": (lora, {"forward": "padded", "pad_to_multiple_of": 8}),
    "lora prefix": (lora, {"forward": "prefix", "gradient_checkpointing": True}),
    "dora": (functools.partial(lora, use_dora=True), {"micro_batch_tokens": 60}),
    "residual": (gpt2, {"gradient_checkpointing": True, "num_iterations": 2, "max_steps": 2}),
    "residual, reentrant": (gpt2, REENTRANT),
    "modules_to_save": (with_head, {"top_entropy_quantile": 0.5}),
    "prefixes of a hybrid": (hybrid, {"beta": 0.1}),
    "ahead": (lora, {"rollout_lag": 1, "max_steps": 3}),
}


def learned(folder: Any, kind: str, size: int, **changes: Any) -> torch.Tensor:
    build, settings = CASES[kind]
    return update(
        folder / str(size), per_device_train_batch_size=size, **{"max_steps": 1, **build(), **settings, **changes}
    )[0]


@pytest.fixture(scope="module")
def lora_step(tmp_path_factory) -> torch.Tensor:
    """What one step of the usual adapter learns."""
    return update(tmp_path_factory.mktemp("lora"), max_steps=1, **lora())[0]


# every form learns the same, below
OTHER_FORMS = ("lora padded", "lora prefix")
LEFT_TO_FULL = {
    *OTHER_FORMS,
    "dora",
    "ahead",
    "prefixes of a hybrid",
    "modules_to_save",
    "residual",
    "residual, reentrant",
}


@pytest.mark.parametrize("kind", few_of(CASES, CASES.keys() - LEFT_TO_FULL))
def test_the_update_does_not_depend_on_the_micro_batch_size(tmp_path, kind):
    whole, cut = (learned(tmp_path, kind, size) for size in (16, 3))
    assert error(whole, cut) <= UPDATE


@pytest.mark.parametrize("kind", few_of(["lora", "residual"], ["lora"]))
def test_bitwise_mode_has_the_same_bits(tmp_path, kind):
    settings = {"bitwise_invariant": True}
    assert torch.equal(*(learned(tmp_path, kind, size, **settings) for size in (16, 3)))


def test_every_form_learns_the_same(tmp_path, lora_step):
    for form in ("padded", "prefix"):
        assert error(lora_step, update(tmp_path / form, max_steps=1, forward=form, **lora())[0]) <= UPDATE


def test_the_control_torchs_dropout_depends_on_the_split(tmp_path, monkeypatch):
    for place in ("trainer", "forward.runner"):
        monkeypatch.setattr(f"grpo_ext.{place}.keyed_dropout", lambda *args, **kwargs: contextlib.nullcontext())
    settings = {"allow_split_dependent": True}
    assert error(*(learned(tmp_path, "lora", size, **settings) for size in (16, 3))) > DIFFERENT


def test_dropout_changes_what_is_learned_and_its_rate_does(tmp_path, lora_step):
    for rate in (0.0, 0.2):
        other = update(tmp_path / str(rate), max_steps=1, **lora(lora_dropout=rate))[0]
        assert error(other, lora_step) > DIFFERENT


def test_a_step_that_runs_out_of_memory_finds_its_masks_again(tmp_path, lora_step):
    failed = []

    class Short(GRPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("planted")
            return loss

    again = update(tmp_path, cls=Short, max_steps=1, **lora())[0]
    assert failed
    assert error(lora_step, again) <= UPDATE


def test_a_resume_and_a_rerun_go_on_with_the_same_masks_and_another_rate_is_refused(tmp_path):
    settings = {**SAVE, "max_steps": 2}
    whole = ran(make(tmp_path, **settings, **lora()))
    again = make(tmp_path, **settings, **lora()).rerun(2, gradients=True)
    assert again.comparison.verdict == "same bits", again.text
    other = make(tmp_path, **settings, **lora(lora_dropout=0.3))
    with pytest.raises(CheckpointError, match="lora_dropout"):
        other.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-1")
    resumed = ran(make(tmp_path, per_device_train_batch_size=3, **settings, **lora()), f"{tmp_path}/checkpoint-1")
    assert error(trained(whole.model), trained(resumed.model)) <= UPDATE


# ---- Where there is none --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_sampling_scores_and_evaluations_run_without(tmp_path):
    settings = {"num_iterations": 2, "beta": 0.1, "eval_dataset": prompts(3), "max_steps": 2}
    trainer, plain = (make(tmp_path / str(rate), **settings, **lora(lora_dropout=rate)) for rate in (0.5, 0.0))
    plain.model.load_state_dict(trainer.model.state_dict(), strict=False)
    one, other = trainer.evaluate(), plain.evaluate()
    for name in ("eval_loss", "eval_reward", "eval_entropy"):
        assert one[name] == pytest.approx(other[name], abs=1e-6), name
    trainer.train()
    plain.train()
    # what is sampled before the first update, its scores under policy and reference
    one, other = (next(line for line in t.state.log_history if "loss" in line) for t in (trainer, plain))
    assert one["reward"] == other["reward"]
    assert one["completions/mean_length"] == other["completions/mean_length"]
    assert abs(one["grad_norm"] - other["grad_norm"]) > 1e-3


def test_on_policy_the_ratio_is_one(tmp_path):
    trainer = ran(make(tmp_path, max_steps=1, epsilon=1e-6, **lora(lora_dropout=0.5)))
    line = next(line for line in trainer.state.log_history if "loss" in line)
    assert line["clip_ratio/region_mean"] == 0.0
    reused = ran(make(tmp_path / "reused", max_steps=1, num_iterations=2, epsilon=1e-6, **lora(lora_dropout=0.5)))
    line = next(line for line in reused.state.log_history if "loss" in line)
    assert line["clip_ratio/region_mean"] > 0.1  # of the masked policy to the one that sampled


def test_after_training_dropout_is_torchs_again(tmp_path):
    trainer = ran(make(tmp_path, max_steps=1, **lora()))
    modules = [module for module in trainer.model.modules() if isinstance(module, nn.Dropout)]
    assert modules
    assert not any("forward" in vars(module) for module in modules)


# ---- Refused --------------------------------------------------------------------------------------------------------


class Gathering(nn.Module):
    """Sends the first token of a batch through a dropout, as a router sends some tokens to an expert."""

    def __init__(self, below: nn.Module) -> None:
        super().__init__()
        self.below, self.drop = below, nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.below(hidden)
        first, others = output.flatten(0, 1).split_with_sizes([1, output[..., 0].numel() - 1])
        return torch.cat([self.drop(first), others]).view_as(output)


class Noisy(nn.Module):
    """Draws what no name tells."""

    def __init__(self, below: nn.Module, scale: float = 0.1) -> None:
        super().__init__()
        self.below, self.scale = below, scale

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.below(hidden)
        return nn.functional.dropout(output, self.scale, training=self.training and self.scale > 0)


def with_mlp(wrap: Callable[[nn.Module], nn.Module]) -> Any:
    model = tiny_model("qwen2")
    model.model.layers[1].mlp = wrap(model.model.layers[1].mlp)
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "attention (GPT-2's default)": (
        lambda: tiny_model("gpt2", resid_pdrop=0.1, attn_pdrop=0.1),
        r"draws random numbers for its batch in transformer.h.0.attn \(GPT2Attention\).*attn_pdrop in GPT-2",
    ),
    "a function": (lambda: with_mlp(Noisy), r"random numbers for its batch in model.layers.1.mlp \(Noisy\)"),
    "tokens of an expert": (
        lambda: with_mlp(Gathering),
        r"model.layers.1.mlp.drop \(p=0.1\) gets an input \(\d+, 32\) without an axis of the forward's tokens",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name_before_training(tmp_path, kind):
    build, message = REFUSED[kind]
    trainer = make(tmp_path, build())
    with pytest.raises(SplitDependentError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
    ran(make(tmp_path / "allowed", build(), max_steps=1, allow_split_dependent=True))
    if kind != "a function":
        ran(make(tmp_path / "off", build(), max_steps=1, disable_dropout=True))


def test_noise_that_begins_later_ends_the_run_before_an_update(tmp_path):
    model = with_mlp(functools.partial(Noisy, scale=0.0))
    begin = on("on_step_end", lambda state: setattr(model.model.layers[1].mlp, "scale", 0.1), at=1)
    trainer = make(tmp_path, model, callbacks=[begin])
    with pytest.raises(SplitDependentError, match=r"random numbers for its batch in model.layers.1.mlp \(Noisy\)"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.full
def test_a_users_own_forward_has_no_tokens_to_follow(tmp_path, caplog):
    class Own(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            extra = model(inputs["completion_ids"]).logits.mean()
            return super().compute_loss(model, inputs, *args, **kwargs) + 0.1 * extra

    with pytest.raises(
        SplitDependentError, match=r"lora_dropout.default \(p=0.1\) runs on rows that are not those of a micro-batch"
    ):
        make(tmp_path, cls=Own, forward="padded", **lora()).train()
    ran(make(tmp_path / "allowed", cls=Own, forward="padded", max_steps=1, allow_split_dependent=True, **lora()))
    assert caplog.text.count("Not every mask of dropout belongs to a token") == 1
    ran(make(tmp_path / "plain", cls=Own, forward="padded", max_steps=1, **lora(lora_dropout=0.0)))


class OtherTensors(GRPOTrainer):
    """Passes on the same tokens in tensors of its own, as losses copied from TRL do."""

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(model, ids.clone(), mask, *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = trl.GRPOTrainer._compute_loss(self, model, inputs)
        return loss


class OtherOrder(GRPOTrainer):
    """Passes on the rows in two parts and in another order."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = list(range(len(inputs["completion_ids"])))[::-1]
        parts = [part for part in (rows[::2], rows[1::2]) if part]
        columns = [{n: v[p] if torch.is_tensor(v) and v.dim() else v for n, v in inputs.items()} for p in parts]
        return sum(super(OtherOrder, self).compute_loss(model, part, *args, **kwargs) for part in columns)


class OtherColumns(GRPOTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        copies = {name: inputs[name].clone() for name in ("completion_ids", "completion_mask")}
        return super().compute_loss(model, {**inputs, **copies}, *args, **kwargs)


CUT = {"per_device_train_batch_size": 3}


@pytest.mark.parametrize("cls", few_of([OtherTensors, OtherColumns, OtherOrder], [OtherTensors]))
def test_losses_of_users_have_the_masks_of_their_tokens(tmp_path, lora_step, cls):
    own, cut = (update(tmp_path, cls=cls, max_steps=1, **size, **lora())[0] for size in ({}, CUT))
    assert error(lora_step, own) <= UPDATE
    assert error(own, cut) <= UPDATE


@pytest.mark.parametrize("settings", [{"rank_dropout": 0.1}, {"module_dropout": 0.1}])
def test_other_rates_of_peft_are_refused(tmp_path, settings):
    config = LoHaConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings)
    with pytest.raises(ModelError, match=next(iter(settings))):
        make(tmp_path, peft_config=config).train()


@pytest.mark.full
def test_draws_without_effect_are_no_noise(tmp_path):
    """Of PEFT's LoHa and LoKr at rate 0, and of a user's hook."""

    def monitored(state: Any) -> None:
        model.model.layers[0].mlp.register_forward_hook(lambda *args: print(torch.randperm(4)))

    config = LoHaConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    split = [
        update(tmp_path / str(size), peft_config=config, per_device_train_batch_size=size, max_steps=1)[0]
        for size in (16, 3)
    ]
    assert error(*split) <= UPDATE
    config = LoKrConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    ran(make(tmp_path / "lokr", peft_config=config, max_steps=1))
    model = tiny_model()
    ran(make(tmp_path / "hook", model, callbacks=[on("on_train_begin", monitored)], max_steps=1))


# ---- As users write it ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_defaults_of_trls_model_options_train(tmp_path):
    config = ModelConfig(use_peft=True, lora_r=4)
    assert config.lora_dropout == 0.05
    settings = {"peft_config": get_peft_config(config), "max_steps": 1}
    split = [update(tmp_path / str(size), per_device_train_batch_size=size, **settings)[0] for size in (16, 5)]
    assert error(*split) <= UPDATE


@pytest.mark.full
def test_a_callback_that_evaluates_or_saves_in_between_changes_nothing(tmp_path):
    class Saving(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.save_pretrained(tmp_path / "adapter")
            with torch.no_grad():
                model(torch.ones(1, 4, dtype=torch.long))

    plain, saved = (update(tmp_path / str(len(c)), callbacks=c, max_steps=2, **lora())[0] for c in ([], [Saving()]))
    assert torch.equal(plain, saved)
