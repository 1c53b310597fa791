"""What a user's `_generate_and_score_completions` returns is trained on as stock TRL does, however a step is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.errors import ModelError
from tests.support.own_generate import Sampler, apart, change
from tests.support.tiny import config_kwargs, letter_reward, stock_scores, tiny_model, tiny_tokenizer
from tests.tolerances import ADAM_EPSILON, DIFFERENT, UPDATE

# of one length, because stock TRL lets padding move GPT-2's absolute positions
PROMPTS = Dataset.from_dict({"prompt": ["abcd>", "hgfe>", "aceg>", "bdfh>", "afbg>", "chde>", "gabc>", "fhea>"]})
SETTINGS: dict[str, Any] = {"shuffle_dataset": False, "adam_epsilon": ADAM_EPSILON, "learning_rate": 1e-2}


def build(folder: Any, base: type, mixin: Any = None, kind: str = "qwen2", size: int = 16, **settings: Any) -> Any:
    cls = type("Own", (mixin, base) if mixin else (base,), {})
    kwargs = config_kwargs(folder, **{**SETTINGS, "per_device_train_batch_size": size, **settings})
    config: Any = GRPOConfig
    if base is trl.GRPOTrainer:
        config = trl.GRPOConfig
        del kwargs["global_batch_size"], kwargs["rollout_chunk_size"]
    model = tiny_model(kind)
    model.save_pretrained(str(folder) + "-reference")
    model.config._name_or_path = str(folder) + "-reference"
    model.generate = Sampler()
    return cls(model, letter_reward, config(**kwargs), PROMPTS, processing_class=tiny_tokenizer())


class Changed:
    """An override that changes the dictionary that TRL returns."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        scored = super()._generate_and_score_completions(inputs)
        self.changed(scored)
        return scored

    def changed(self, scored: dict[str, Any]) -> None:
        raise NotImplementedError


class WithoutTheFirst(Changed):
    def changed(self, scored: dict[str, Any]) -> None:
        scored["completion_mask"][:, 0] = 0


class WithoutTheMiddle(Changed):
    """Of every other completion, two tokens."""

    def changed(self, scored: dict[str, Any]) -> None:
        scored["completion_mask"][::2, 2:4] = 0


class WithoutPartOfThePrompt(Changed):
    def changed(self, scored: dict[str, Any]) -> None:
        scored["prompt_mask"][1::2, 2] = 0


MASKED = (WithoutTheFirst, WithoutTheMiddle, WithoutPartOfThePrompt)


class WithMoreTokens(Changed):
    """Two more for each completion, which carry loss."""

    def changed(self, scored: dict[str, Any]) -> None:
        more = torch.full_like(scored["completion_ids"][:, :2], 9)
        scored["completion_ids"] = torch.cat([scored["completion_ids"], more], dim=1)
        scored["completion_mask"] = torch.cat([scored["completion_mask"], torch.ones_like(more)], dim=1)


class AdvantagesOfTokens(Changed):
    def changed(self, scored: dict[str, Any]) -> None:
        places = torch.linspace(0.5, 2.0, scored["completion_ids"].size(1))
        scored["advantages"] = scored["advantages"][:, None] * places


@stock_scores
@pytest.mark.parametrize(  # masks move the absolute positions of GPT-2
    ("mixin", "kind"),
    [
        *((mixin, "gpt2") for mixin in MASKED),
        *((mixin, "qwen2") for mixin in (WithMoreTokens, AdvantagesOfTokens)),
        *(pytest.param(mixin, "qwen2", marks=pytest.mark.full) for mixin in MASKED),
    ],
)
def test_a_changed_dictionary_is_trained_on_as_stock_trl_does(tmp_path, mixin, kind):
    stock = change(build(tmp_path / "stock", trl.GRPOTrainer, mixin, kind))
    assert apart(stock, change(build(tmp_path / "plain", trl.GRPOTrainer, None, kind))) > DIFFERENT
    for size in (8, 3):
        ours = change(build(tmp_path / f"{size}", GRPOTrainer, mixin, kind, size))
        assert apart(stock, ours) < UPDATE, size


@stock_scores
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo", "gradient_checkpointing": True},
        {"loss_type": "bnpo", "num_iterations": 2},
        {"loss_type": "dr_grpo", "forward": "prefix"},
    ],
    ids=str,
)
def test_tokens_left_out_are_left_out_by_every_forward(tmp_path, settings):
    ours_alone = {name: settings[name] for name in ("forward",) if name in settings}
    shared = {name: value for name, value in settings.items() if name not in ours_alone}
    stock = change(build(tmp_path / "stock", trl.GRPOTrainer, WithoutTheMiddle, **shared))
    for size in (16, 3):
        ours = change(build(tmp_path / f"{size}", GRPOTrainer, WithoutTheMiddle, size=size, **settings))
        assert apart(stock, ours) < UPDATE, size


class WithFields(Changed):
    """Fields of many shapes, all of which the loss depends on."""

    def changed(self, scored: dict[str, Any]) -> None:
        rows = len(scored["completion_ids"])
        weights = torch.linspace(0.5, 1.5, rows)
        scored["one"] = weights
        scored["few"] = weights[:, None] * torch.tensor([1.0, 0.5, 0.25])
        scored["cube"] = weights[:, None, None] * torch.ones(1, 2, 3)
        scored["tokens"] = scored["completion_ids"] / 20
        scored["texts"] = ["a" * (1 + row % 3) for row in range(rows)]
        scored["shift"] = torch.tensor(0.75)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids, mask = (torch.cat([inputs[f"prompt_{n}"], inputs[f"completion_{n}"]], 1) for n in ("ids", "mask"))
        width = inputs["completion_ids"].size(1)
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, width)
        assert inputs["one"].shape == inputs["advantages"].shape
        texts = torch.tensor([float(len(text)) for text in inputs["texts"]])
        by_row = inputs["one"] * inputs["few"].sum(1) * inputs["cube"].sum((1, 2)) * texts * inputs["shift"]
        own = (logps * inputs["tokens"] * inputs["completion_mask"]).sum(1) * by_row
        return super()._compute_loss(model, inputs) + own.mean() / 10 / self.current_gradient_accumulation_steps


@stock_scores
def test_fields_of_an_override_reach_the_loss_in_the_shapes_that_trl_hands_over(tmp_path):
    shared = {"loss_type": "grpo", "num_iterations": 2}
    stock = change(build(tmp_path / "stock", trl.GRPOTrainer, WithFields, **shared))
    assert apart(stock, change(build(tmp_path / "plain", trl.GRPOTrainer, **shared))) > DIFFERENT
    for size in (8, 3):
        ours = change(build(tmp_path / f"{size}", GRPOTrainer, WithFields, size=size, **shared))
        assert apart(stock, ours) < UPDATE, size


def test_a_run_with_fields_resumes_within_a_rollout_batch(tmp_path):
    settings = {"rollout_batch_size": 32, "save_strategy": "steps", "save_steps": 1, "loss_type": "grpo"}
    whole = build(tmp_path / "run", GRPOTrainer, WithFields, **settings)
    whole.train()
    again = build(tmp_path / "run", GRPOTrainer, WithFields, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    for one, other in zip(whole.model.parameters(), again.model.parameters()):
        assert torch.equal(one, other)
    assert len(again.model.generate.given) == 0  # nothing was sampled again


class AssignedHook:
    """Log-probabilities of other sizes, by a method that is assigned to the trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        score = self._get_per_token_logps_and_entropies

        def sloped(*args: Any, **kwargs: Any) -> Any:
            logps, *others = score(*args, **kwargs)
            return logps * 0.8 ** torch.arange(logps.size(1)), *others

        self._get_per_token_logps_and_entropies = sloped


@stock_scores
def test_a_hook_that_is_assigned_to_the_trainer_is_called(tmp_path):
    stock = change(build(tmp_path / "stock", trl.GRPOTrainer, AssignedHook))
    assert apart(stock, change(build(tmp_path / "plain", trl.GRPOTrainer))) > DIFFERENT
    for size in (16, 5):
        assert apart(stock, change(build(tmp_path / f"{size}", GRPOTrainer, AssignedHook, size=size))) < UPDATE, size


class MaskedInTheLoss:
    """Attention and loss without the second token, decided in the loss."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mask = inputs["completion_mask"].clone()
        mask[:, 1] = 0
        return super()._compute_loss(model, {**inputs, "completion_mask": mask})


@stock_scores
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_mask_that_is_changed_in_the_loss_is_scored_with(tmp_path, checkpointing):
    settings = {"gradient_checkpointing": checkpointing, "loss_type": "luspo"}  # whose weights count no tokens
    stock = change(build(tmp_path / "stock", trl.GRPOTrainer, MaskedInTheLoss, **settings))
    assert apart(stock, change(build(tmp_path / "plain", trl.GRPOTrainer, **settings))) > DIFFERENT
    for size in (16, 5):
        ours = change(build(tmp_path / f"{size}", GRPOTrainer, MaskedInTheLoss, size=size, **settings))
        assert apart(stock, ours) < UPDATE, size


class PassesOn:
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class KeepsTheRouterBack:
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(*args, **{**kwargs, "compute_aux_loss": False})


def test_a_hook_that_passes_on_changes_no_bit_of_a_model_with_experts(tmp_path):
    plain, passing = (
        change(build(tmp_path / name, GRPOTrainer, mixin, "moe", 5))
        for name, mixin in (("plain", None), ("passing", PassesOn))
    )
    assert torch.equal(plain, passing)
    with pytest.raises(ModelError, match="let an override of _get_per_token_logps_and_entropies pass compute_aux_loss"):
        build(tmp_path / "back", GRPOTrainer, KeepsTheRouterBack, "moe").train()
