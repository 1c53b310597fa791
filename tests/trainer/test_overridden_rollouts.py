"""What a user's `_generate_and_score_completions` returns is trained on as stock TRL does, however a step is cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ModelError
from tests.support.beside_trl import build, learns_as_in_trl, sampling_model
from tests.support.tiny import stock_scores
from tests.support.trainers import change

# of one length, because stock TRL lets padding move GPT-2's absolute positions
PROMPTS = Dataset.from_dict({"prompt": ["abcd>", "hgfe>", "aceg>", "bdfh>", "afbg>", "chde>", "gabc>", "fhea>"]})


def parts(kind: str = "qwen2") -> dict[str, Any]:
    return {"model": sampling_model(kind), "train_dataset": PROMPTS}


class Changed:
    """An override that changes the dictionary that TRL returns, by the `changed` of a subclass."""

    changed: Callable[..., None]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        scored = super()._generate_and_score_completions(inputs)
        self.changed(scored)
        return scored


class WithoutTheMiddle(Changed):
    def changed(self, scored: dict[str, Any]) -> None:
        scored["completion_mask"][::2, 2:4] = 0


class WithoutPartOfThePrompt(Changed):
    def changed(self, scored: dict[str, Any]) -> None:
        scored["prompt_mask"][1::2, 2] = 0


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
        (WithoutTheMiddle, "gpt2"),
        (WithoutPartOfThePrompt, "gpt2"),
        (WithMoreTokens, "qwen2"),
        (AdvantagesOfTokens, "qwen2"),
    ],
)
def test_a_changed_dictionary_is_trained_on_as_stock_trl_does(tmp_path, mixin, kind):
    learns_as_in_trl(tmp_path, mixin, lambda: parts(kind))


@stock_scores
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo", "gradient_checkpointing": True},
        {"loss_type": "dr_grpo", "forward": "prefix"},
    ],
    ids=str,
)
def test_tokens_left_out_are_left_out_by_every_forward(tmp_path, settings):
    learns_as_in_trl(tmp_path, WithoutTheMiddle, parts, **settings)


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
    learns_as_in_trl(tmp_path, WithFields, parts, loss_type="grpo", num_iterations=2)


class PassesOn:
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class KeepsTheRouterBack:
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(*args, **{**kwargs, "compute_aux_loss": False})


def test_a_hook_that_passes_on_changes_no_bit_of_a_model_with_experts(tmp_path):
    plain, passing = (
        change(build(tmp_path / name, GRPOTrainer, mixin, 5, lambda: parts("moe")))
        for name, mixin in (("plain", None), ("passing", PassesOn))
    )
    assert torch.equal(plain, passing)
    with pytest.raises(ModelError, match="_get_per_token_logps_and_entropies pass on compute_aux_loss"):
        build(tmp_path / "back", GRPOTrainer, KeepsTheRouterBack, parts=lambda: parts("moe")).train()
