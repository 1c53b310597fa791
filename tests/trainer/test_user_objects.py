"""Objects that users hand over: none is asked for its truth, and what `torch.compile` wraps is refused by name."""

from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo_ext.errors import ModelError
from tests.support.selection import few_of
from tests.support.tiny import letter_reward, prompts, tiny_model, tiny_scorer, tiny_tokenizer
from tests.support.trainers import make, other, parameters, ran


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
        "max_completion_length": 4,
    }


AHEAD = {"rollout_lag": 1, "bitwise_invariant": True, "reward": Reward(), "reward_processing_classes": None}


@pytest.mark.parametrize("changes", few_of([{}, AHEAD], [{}]))
def test_no_object_is_asked_for_its_truth(tmp_path, changes):
    whole = ran(other(tmp_path / "whole", **objects(**changes)))
    again = ran(other(tmp_path / "again", **objects(**changes)), tmp_path / "whole" / "checkpoint-1")
    assert torch.equal(parameters(whole), parameters(again))


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def test_a_model_that_torch_compile_wraps_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match=r"torch.compile wraps the model, .* torch_compile=True"):
        make(tmp_path, torch.compile(tiny_model(), backend="eager"))


def test_a_model_with_a_compiled_part_is_refused_unless_it_is_compiled_in_place(tmp_path):
    model = tiny_model()
    layers = model.model.layers
    layers[1].compile(backend="eager")
    make(tmp_path / "in place", model)
    layers[0] = torch.compile(layers[0], backend="eager")
    with pytest.raises(ModelError, match=r"torch.compile wraps model.layers.0, so"):
        make(tmp_path, model)
