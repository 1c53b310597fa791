"""What users change once a trainer is built acts at the next rollout batch, as in stock TRL, or is refused by name.

Each change is made by a subclass after `super().__init__()`, and by a callback in mid-run. The list is that of
docs/overrides.md; settings of the loss are in test_hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.parity.scripts import EOS, TEMPLATE, by_turn, call, chat_tokenizer, conversations, letters, scripted_model
from tests.support.beside_trl import changing, learns_as_in_trl, setting
from tests.support.tiny import given_rollout, letter_reward, sparse_reward, stock_scores, tool
from tests.support.tool_runs import count, transcript_reward

Change = Callable[[Any], None]
OTHER = TEMPLATE.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}?!")


def afterwards(change: Change) -> type:
    """A subclass that changes the trainer once it is built."""

    class Afterwards:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            change(self)

    return Afterwards


def once(change: Change) -> type:
    """A callback that changes the trainer once it has made a step."""
    return changing(change, 1)


WHEN = pytest.mark.parametrize("when", [afterwards, once], ids=["subclass", "callback"])


# ---- What the runs are made of --------------------------------------------------------------------------------------


@tool
def double(number: int) -> str:
    return str(2 * number)


@tool
async def later(number: int) -> str:
    return str(number)


def talking(*replies: str) -> Callable[[], dict[str, Any]]:
    """The parts of a run whose completions call tools in their first turn."""

    def parts() -> dict[str, Any]:
        tokenizer = chat_tokenizer()
        said = replies or (f"a{EOS}", call("count", number=3) + EOS)
        model = scripted_model(tokenizer, by_turn(list(said), [f"bcd{EOS}", call("count", number=5) + EOS], [f"e{EOS}"]))
        usual = {"reward_funcs": transcript_reward, "train_dataset": conversations(), "processing_class": tokenizer}
        return {"model": model, "tools": [count], **usual}

    return parts


def spelling() -> dict[str, Any]:
    """The parts of a run that speaks letters until it is cut."""
    return {"model": scripted_model(chat_tokenizer(), letters), "processing_class": chat_tokenizer()}


def length_reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def two_rewards() -> dict[str, Any]:
    return {"reward_funcs": [letter_reward, sparse_reward]}


class Counter:
    """An environment with a tool."""

    step = 1

    def reset(self, **row: Any) -> str:
        self.value = 0
        return f" from {self.step}"

    @tool
    def add(self, number: int) -> str:
        self.value += self.step * number
        return str(self.value)


class Doubling(Counter):
    step = 2


def playing() -> dict[str, Any]:
    """The parts of a run in an environment."""
    return {**talking(f"a{EOS}", call("add", number=3) + EOS)(), "tools": None, "environment_factory": Counter}


# ---- Changes --------------------------------------------------------------------------------------------------------


def other_tokenizer(trainer: Any) -> None:
    trainer.processing_class = copy.deepcopy(trainer.processing_class)
    trainer.processing_class.chat_template = OTHER
    trainer.processing_class.response_template = None  # TRL parses with the first one


def other_environments(trainer: Any) -> None:
    trainer.environment_factories = {None: Doubling}
    del trainer._environment_pool[None][3:]  # instances that are there are used again


def other_reference(trainer: Any) -> None:
    trainer.ref_model = copy.deepcopy(trainer.ref_model)
    with torch.no_grad():
        trainer.ref_model.model.embed_tokens.weight.mul_(1.5)


def renamed(trainer: Any) -> None:
    trainer.reward_func_names = ["first", "second"]


TURNS = {"max_completion_length": 200}


@dataclass(frozen=True)
class Followed:
    """A change that is followed.

    Attributes:
        name: what docs/overrides.md calls it.
        act: makes it.
        differs: the update is another than without it.
    """

    name: str
    act: Change
    parts: Callable[[], dict[str, Any]] = dict
    settings: dict[str, Any] = field(default_factory=dict)
    differs: bool = True


# settings of a rollout batch that are followed
FOLLOWED = {
    "chat_template": Followed("chat_template", setting("chat_template", OTHER), talking(), TURNS),
    "chat_template_kwargs": Followed(
        "chat_template_kwargs", setting("chat_template_kwargs", {"style": "curt"}), talking(), TURNS
    ),
    "chat_template_kwargs in place": Followed(
        "chat_template_kwargs",
        lambda trainer: trainer.chat_template_kwargs.update(style="rude"),
        talking(),
        TURNS,
    ),
    "processing_class": Followed("processing_class", other_tokenizer, talking(), TURNS),
    "processing_class in place": Followed(
        "processing_class",
        lambda trainer: setattr(trainer.processing_class, "chat_template", OTHER),
        talking(),
        TURNS,
    ),
    "tools": Followed(
        "tools",
        lambda trainer: trainer.tools.append(double),
        talking(call("double", number=4) + EOS, call("count", number=3) + EOS),
        TURNS,
    ),
    "tools that prompts alone show": Followed(
        "tools",
        setting("tools", [count, double]),
        talking(call("double", number=4) + EOS, call("count", number=3) + EOS),
        TURNS,
    ),
    "environment_factories": Followed("environment_factories", other_environments, playing, TURNS),
    "eos_token_ids": Followed("eos_token_ids", setting("eos_token_ids", [1, 5, 7])),
    "eos_token_ids in place": Followed("eos_token_ids", lambda trainer: trainer.eos_token_ids.extend([5, 7])),
    "pad_to_multiple_of": Followed("pad_to_multiple_of", setting("pad_to_multiple_of", 32), differs=False),
    "generation_config": Followed(
        "generation_config", lambda trainer: setattr(trainer.generation_config, "max_new_tokens", 4), spelling
    ),
    "generation_kwargs": Followed("generation_kwargs", setting("generation_kwargs", {"top_k": 1}), differs=False),
    "max_completion_length": Followed("max_completion_length", setting("max_completion_length", 60), talking(), TURNS),
    "max_tool_calling_iterations": Followed(
        "max_tool_calling_iterations", setting("max_tool_calling_iterations", 1), talking(), TURNS
    ),
    "mask_truncated_completions": Followed("mask_truncated_completions", setting("mask_truncated_completions", True)),
    "rollout_func": Followed("rollout_func", setting("rollout_func", given_rollout)),
    "reward_funcs": Followed("reward_funcs", setting("reward_funcs", [letter_reward, length_reward]), two_rewards),
    "reward_func_names": Followed("reward_func_names", renamed, two_rewards, differs=False),
    "reward_weights": Followed("reward_weights", setting("reward_weights", torch.tensor([0.1, 5.0])), two_rewards),
    "scale_rewards": Followed("scale_rewards", setting("scale_rewards", "none"), two_rewards),
    "multi_objective_aggregation": Followed(
        "multi_objective_aggregation", setting("multi_objective_aggregation", "normalize_then_sum"), two_rewards
    ),
    "ref_model": Followed("ref_model", other_reference, settings={"beta": 0.5, "max_steps": 3}),
    "beta": Followed("beta", setting("beta", 0.5), settings={"beta": 0.01, "max_steps": 3}),
}


@stock_scores
@WHEN
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_change_is_followed_as_in_trl(tmp_path, name, when):
    case = FOLLOWED[name]
    learns_as_in_trl(tmp_path, when(case.act), case.parts, case.differs, **case.settings)
