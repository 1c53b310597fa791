"""Models with a `generate` of their own: called as TRL calls it, and trained on as TRL does, for every split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import trl
from peft import get_peft_model

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.errors import ConfigError
from grpo_ext.rollouts.decoding import own_generate
from tests.support.drop_in import TOOL_CALL, CountingGame, conversations, log_of, make
from tests.support.own_generate import LORA, Sampler, Wrapper, apart, change, model_with
from tests.support.tiny import config_kwargs, letter_reward, prompts, stock_scores, tiny_model, tiny_tokenizer
from tests.tolerances import ADAM_EPSILON, DIFFERENT, UPDATE

KINDS = ["subclass", "instance", "wrapper"]


def trained(folder: Any, cls: type, model: Any, peft: Any = None, **settings: Any) -> tuple[torch.Tensor, Any]:
    changes = {"shuffle_dataset": False, "adam_epsilon": ADAM_EPSILON, "learning_rate": 1e-2, **settings}
    kwargs = config_kwargs(folder, **changes)
    config = GRPOConfig
    if cls is trl.GRPOTrainer:
        config = trl.GRPOConfig
        del kwargs["global_batch_size"], kwargs["rollout_chunk_size"]
    torch.manual_seed(5)  # of the adapter's start
    trainer = cls(
        model, letter_reward, config(**kwargs), prompts(8), processing_class=tiny_tokenizer(), peft_config=peft
    )
    return change(trainer), trainer


@stock_scores
@pytest.mark.parametrize("peft", [None, pytest.param(LORA, marks=pytest.mark.full)], ids=["plain", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_called_as_trl_calls_it_and_learns_what_trl_learns(tmp_path, kind, peft, caplog):
    theirs, ours = Sampler(), Sampler()
    settings = {"per_device_train_batch_size": 16}
    stock, _ = trained(tmp_path, trl.GRPOTrainer, model_with(theirs, kind), peft, **settings)
    caplog.clear()
    same, _ = trained(tmp_path, GRPOTrainer, model_with(ours, kind), peft, rollout_chunk_size=16, **settings)
    assert apart(stock, same) < UPDATE
    assert caplog.text.count("samples, and not by key; only the update is covered") == 1
    assert len(ours.given) == len(theirs.given) == 2
    for one, other in zip(ours.given, theirs.given):
        assert one.keys() == other.keys() == {"input_ids", "attention_mask", "generation_config"}
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["attention_mask"], other["attention_mask"])
        assert one["generation_config"].to_diff_dict() == other["generation_config"].to_diff_dict()
    small, _ = trained(tmp_path, GRPOTrainer, model_with(Sampler(), kind), peft)  # chunks of 8, micro-batches of 5
    assert apart(same, small) < UPDATE
    other, _ = trained(tmp_path, GRPOTrainer, model_with(Sampler("short"), kind), peft)
    assert apart(same, other) > DIFFERENT


def test_one_put_on_the_adapter_itself_is_found(tmp_path):
    sampler = Sampler()
    trained(tmp_path, GRPOTrainer, model_with(sampler, "adapter instance"))
    assert [len(given["input_ids"]) for given in sampler.given] == [8] * 4


@stock_scores
@pytest.mark.parametrize("shape", ["short", "long", "left"])
def test_answers_of_every_shape_are_taken_as_trl_takes_them(tmp_path, shape):
    stock, _ = trained(
        tmp_path, trl.GRPOTrainer, model_with(Sampler(shape), "instance"), per_device_train_batch_size=16
    )
    same, _ = trained(tmp_path, GRPOTrainer, model_with(Sampler(shape), "instance"))
    assert apart(stock, same) < UPDATE


def test_one_that_is_replaced_after_the_trainer_is_built_is_found(tmp_path, caplog):
    trainer = make(tmp_path, max_steps=1)
    sampler = trainer.model.generate = Sampler()
    trainer.train()
    assert len(sampler.given) == 2
    assert "not by key" in caplog.text


def test_bitwise_mode_refuses_it(tmp_path):
    def build(model):
        return make(tmp_path, model=model, bitwise_invariant=True, max_steps=1)

    with pytest.raises(ConfigError, match=r"a generate of one.s own \(.*OwnQwen2.generate\) go through other code"):
        build(model_with(Sampler(), "subclass"))
    trainer = build(tiny_model())
    trainer.model.generate = Sampler()
    with pytest.raises(ConfigError, match=r"a generate of one.s own \(.*Sampler\)"):
        trainer.train()


def test_evaluation_asks_it_chunk_by_chunk(tmp_path):
    sampler = Sampler()
    trainer = make(tmp_path, model=model_with(sampler, "subclass"), num_generations_eval=2)
    first = trainer.evaluate(prompts(7, seed=4))
    assert [len(given["input_ids"]) for given in sampler.given] == [8, 6]
    again = make(
        tmp_path, model=model_with(Sampler(), "subclass"), num_generations_eval=2, per_device_eval_batch_size=3
    )
    assert again.evaluate(prompts(7, seed=4))["eval_reward"] == first["eval_reward"]


def test_reward_models_score_what_it_returns(tmp_path):
    config = tiny_model("llama").config
    config.num_labels = 1
    scorer = transformers.AutoModelForSequenceClassification.from_config(config)
    scorer.config._name_or_path = "scorer"
    trainer = make(
        tmp_path,
        model=model_with(Sampler(), "wrapper"),
        rewards=[letter_reward, scorer],
        extra={"reward_processing_classes": [None, tiny_tokenizer()]},
    )
    trainer.train()
    assert len(log_of(trainer, "rewards/scorer/mean")) == 2


@pytest.mark.parametrize("peft", [None, LORA], ids=["plain", "lora"])
def test_tools_and_environments_work_on_top_of_it(tmp_path, tool_tokenizer, peft):
    call = tool_tokenizer(TOOL_CALL + "<|im_end|>")["input_ids"]
    done = tool_tokenizer("ok<|im_end|>")["input_ids"]
    turns = []

    def scripted(input_ids, attention_mask, generation_config):
        first = turns.count("first") < 2
        turns.append("first" if first else "later")
        answers = [call if first and row % 2 == 0 else done for row in range(len(input_ids))]
        width = max(map(len, answers))
        padded = [answer + [tool_tokenizer.pad_token_id] * (width - len(answer)) for answer in answers]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    model = tiny_model(max_position_embeddings=4096)
    model.resize_token_embeddings(len(tool_tokenizer))
    model.generate = scripted
    trainer = make(
        tmp_path,
        model=model,
        rewards=None,
        dataset=conversations(),
        tokenizer=tool_tokenizer,
        extra={"environment_factory": CountingGame, "peft_config": peft},
        max_completion_length=512,
        max_steps=1,
        global_batch_size=8,
        rollout_chunk_size=4,
        per_device_train_batch_size=3,
    )
    trainer.train()
    assert turns == ["first", "first", "later", "later"]
    assert log_of(trainer, "reward") == [0.5]
    assert log_of(trainer, "tools/call_frequency") == [0.5]


def test_what_samples_as_transformers_does_is_not_mistaken(monkeypatch):
    plain = tiny_model()
    assert own_generate(plain) is None
    assert own_generate(Wrapper(plain)) is None
    adapted = get_peft_model(tiny_model("llama"), LORA)
    assert own_generate(adapted) is None
    assert own_generate(get_peft_model(Wrapper(tiny_model("llama")), LORA)) is None
    for kind in KINDS:
        assert own_generate(model_with(Sampler(), kind)) is not None
        assert own_generate(get_peft_model(model_with(Sampler(), kind), LORA)) is not None
    monkeypatch.setattr(transformers.GenerationMixin, "generate", lambda self, **kwargs: None)  # by a faster library
    assert own_generate(plain) is not None
    assert own_generate(adapted) is not None
