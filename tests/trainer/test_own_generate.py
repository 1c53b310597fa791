"""Models with a `generate` of their own: called as TRL calls it, and trained on as TRL does, for every split."""

import itertools
from typing import Any

import pytest
import torch
import transformers
import trl
from peft import LoraConfig, get_peft_model

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from tests.support.beside_trl import build
from tests.support.kept import of_stock
from tests.support.own_generate import Sampler
from tests.support.tiny import stock_scores, tiny_model
from tests.support.trainers import LORA, change, error, make
from tests.tolerances import DIFFERENT, UPDATE

KINDS = ["subclass", "instance"]


class OwnQwen2(transformers.Qwen2ForCausalLM):
    sampler: Sampler

    def generate(self, **kwargs: Any) -> torch.Tensor:
        return self.sampler(**kwargs)


def model_with(sampler: Sampler, kind: str) -> Any:
    model = tiny_model()
    if kind == "subclass":
        model.__class__ = OwnQwen2
        model.sampler = sampler
    else:
        model.generate = sampler
    return model


def trained(folder: Any, cls: type, model: Any, size: int = 5, **settings: Any) -> torch.Tensor:
    return change(build(folder, cls, size=size, model=model, **settings))


@stock_scores
def test_it_is_called_as_trl_calls_it_and_learns_what_trl_learns(tmp_path, caplog):
    theirs, ours = Sampler(), Sampler()
    stock = trained(tmp_path, trl.GRPOTrainer, model_with(theirs, "subclass"), 16)
    caplog.clear()
    same = trained(tmp_path, GRPOTrainer, model_with(ours, "subclass"), 16, rollout_chunk_size=16)
    assert error(stock, same) < UPDATE
    assert caplog.text.count("completions are not sampled by key; only the update is covered") == 1
    assert len(ours.given) == len(theirs.given) == 2
    for one, other in zip(ours.given, theirs.given):
        assert one.keys() == other.keys() == {"input_ids", "attention_mask", "generation_config"}
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["attention_mask"], other["attention_mask"])
        assert one["generation_config"].to_diff_dict() == other["generation_config"].to_diff_dict()
    small = trained(tmp_path, GRPOTrainer, model_with(Sampler(), "instance"))  # chunks of 8, micro-batches of 5
    assert error(same, small) < UPDATE
    other = trained(tmp_path, GRPOTrainer, model_with(Sampler("short"), "instance"))
    assert error(same, other) > DIFFERENT


@stock_scores
@pytest.mark.parametrize("shape", ["long", "left"])
def test_answers_of_every_shape_are_taken_as_trl_takes_them(tmp_path, shape):
    stock = of_stock(lambda: trained(tmp_path, trl.GRPOTrainer, model_with(Sampler(shape), "instance"), 16))
    same = trained(tmp_path, GRPOTrainer, model_with(Sampler(shape), "instance"))
    assert error(stock, same) < UPDATE


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(**LORA))


def test_bitwise_mode_takes_adapters_and_refuses_whatever_else_samples(tmp_path, monkeypatch):
    def build(model: Any) -> None:
        make(tmp_path, model=model, bitwise_invariant=True, max_steps=1)

    refused = {"match": r"\(only this trainer's own sampling"}
    build(adapted(tiny_model("llama")))
    for kind, wrap in itertools.product(KINDS, (lambda model: model, adapted)):
        with pytest.raises(ConfigError, **refused):
            build(wrap(model_with(Sampler(), kind)))
    trainer = make(tmp_path, bitwise_invariant=True, max_steps=1)
    trainer.model.generate = Sampler()
    with pytest.raises(ConfigError, **refused):
        trainer.train()
    monkeypatch.setattr(transformers.GenerationMixin, "generate", lambda self, **kwargs: None)  # by a faster library
    for model in (tiny_model(), adapted(tiny_model("llama"))):
        with pytest.raises(ConfigError, **refused):
            build(model)
