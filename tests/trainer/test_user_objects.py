"""Objects that users hand over: none is asked for its truth, and a model that `torch.compile` wraps is trained."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from transformers import AutoModelForCausalLM, TrainerCallback

from grpo_ext import GRPOConfig
from grpo_ext.errors import ConfigError, ModelError
from grpo_ext.tools.export import export
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_scorer, tiny_tokenizer
from tests.support.trainers import LORA, change, error, make, other, parameters, ran, trained
from tests.tolerances import DIFFERENT, UPDATE


def no_truth(self: Any) -> bool:
    raise TypeError(f"the truth of {type(self).__name__} was asked for")


def untrue(thing: Any) -> Any:
    """The same object, of a class without a truth."""
    kind = type(thing)
    thing.__class__ = type(kind.__name__, (kind,), {"__bool__": no_truth, "__module__": kind.__module__})
    return thing


class Untrue(TrainerCallback):
    __bool__ = no_truth


class Reward:
    __name__, __bool__ = "own_reward", no_truth

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return letter_reward(prompts, completions)


def objects(**changes: Any) -> dict[str, Any]:
    model, scorer = untrue(tiny_model()), untrue(tiny_scorer())
    optimizer = untrue(torch.optim.AdamW(model.parameters(), lr=1e-3))
    return {
        "model": model,
        "teacher_model": untrue(tiny_model(seed=1)),
        "optimizers": (optimizer, untrue(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))),
        "reward": [Reward(), scorer],
        "reward_processing_classes": [None, untrue(tiny_tokenizer())],
        "processing_class": untrue(tiny_tokenizer()),
        "train_dataset": untrue(prompts(12)),
        "eval_dataset": untrue(prompts(4)),
        "callbacks": [Untrue()],
        **{"beta": 0.1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, **changes},
    }


ALONE = {"reward": Reward(), "reward_processing_classes": None}


@pytest.mark.parametrize("changes", [{}, {"rollout_lag": 1, "bitwise_invariant": True, **ALONE}])
def test_no_object_is_asked_for_its_truth(tmp_path, changes):
    whole = ran(other(tmp_path / "whole", **objects(**changes)))
    again = ran(other(tmp_path / "again", **objects(**changes)), tmp_path / "whole" / "checkpoint-1")
    assert torch.equal(parameters(whole), parameters(again))


# ---- torch.compile ---------------------------------------------------------------------------------------------------


class Counting:
    """A backend that counts the graphs that it runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def compiled(backend: Any = "eager", kind: str = "qwen2", **sizes: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(tiny_model(kind, **sizes), backend=backend)


ONE_LAYER = {"num_hidden_layers": 1}


def test_a_compiled_model_trains_as_the_module_inside_and_is_saved_without_the_wrapper(tmp_path):
    backend = Counting()
    trainer = other(tmp_path / "compiled", model=compiled(backend, **ONE_LAYER), max_steps=1)
    found = change(trainer)
    assert backend.runs > 0
    plain = make(tmp_path / "plain", tiny_model(**ONE_LAYER), max_steps=1)
    assert error(change(plain), found) <= UPDATE
    assert error(change(make(tmp_path / "other", tiny_model(**ONE_LAYER, seed=1), max_steps=1)), found) > DIFFERENT
    checkpoint = tmp_path / "compiled" / "checkpoint-1"
    trainer.save_model(str(tmp_path / "saved"))
    export(checkpoint, tmp_path / "exported")
    for folder in (checkpoint, tmp_path / "saved", tmp_path / "exported"):
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert [name for name in [*file.keys()] if "_orig_mod" in name] == []
        assert torch.equal(trained(AutoModelForCausalLM.from_pretrained(folder)), parameters(trainer))


@pytest.mark.full
def test_a_compiled_model_resumes_and_goes_on_without_the_wrapper(tmp_path):
    whole = ran(other(tmp_path / "whole", model=compiled()))
    checkpoint = tmp_path / "whole" / "checkpoint-1"
    again = ran(other(tmp_path / "again", model=compiled()), checkpoint)
    assert error(parameters(whole), parameters(again)) <= UPDATE
    plain = ran(other(tmp_path / "plain"), checkpoint)
    assert error(parameters(whole), parameters(plain)) <= UPDATE


@pytest.mark.full
def test_a_compiled_model_takes_an_adapter_a_reference_and_half_precision(tmp_path):
    backend = Counting()
    settings = {"peft_config": LoraConfig(**LORA), "beta": 0.1, "bf16": True, "gradient_checkpointing": True}
    trainer = make(tmp_path / "compiled", compiled(backend), **settings)
    found = change(trainer)
    assert backend.runs > 0
    assert error(change(make(tmp_path / "plain", **settings)), found) < DIFFERENT
    assert found.abs().max() > 0


@pytest.mark.parametrize("setting", [{"bitwise_invariant": True}, {"rollout_lag": 1}, {"routing_replay": True}])
def test_a_compiled_model_is_refused_where_torch_compile_is(tmp_path, setting):
    with pytest.raises(ConfigError, match="torch_compile"):
        make(tmp_path, compiled(kind="moe"), **setting)


def test_a_compiled_model_is_refused_under_an_engine(tmp_path, monkeypatch):
    model, args = compiled(), GRPOConfig(**config_kwargs(tmp_path))
    assert GRPOConfig.for_model(args, model).torch_compile
    assert not args.torch_compile, "the user's settings are left alone"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"torch\.compile wraps cannot be combined with fsdp"):
        GRPOConfig.for_model(args, model)


def test_a_model_with_a_compiled_part_is_refused_unless_it_is_compiled_in_place(tmp_path):
    model = tiny_model()
    layers = model.model.layers
    layers[1].compile(backend="eager")
    make(tmp_path / "in place", model)
    layers[0] = torch.compile(layers[0], backend="eager")
    with pytest.raises(ModelError, match=r"torch.compile wraps model.layers.0 \(1 such modules"):
        make(tmp_path, model)
