"""What users change once a trainer is built acts at the next rollout batch, as in stock TRL, or is refused by name.

Each change is made by a subclass after `super().__init__()`, and by a callback in mid-run. The list is that of
docs/overrides.md; its settings of the loss are in test_hooks.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, GenerationConfig

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from tests.parity.scripts import EOS, TEMPLATE, by_turn, call, chat_tokenizer, conversations, letters, scripted_model
from tests.support.beside_trl import LOSS_CHANGES, build, changing, learns_as_in_trl, setting
from tests.support.images import image_model, image_processor, image_rows
from tests.support.launch import ROOT
from tests.support.server import stand_in
from tests.support.tiny import (
    given_rollout,
    letter_reward,
    prompts,
    sparse_reward,
    stock_scores,
    tiny_model,
    tiny_tokenizer,
    tool,
)
from tests.support.tool_runs import count, transcript_reward
from tests.support.trainers import batches_of, log_of, make, on

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


SUBCLASS = pytest.param(afterwards, marks=pytest.mark.full, id="subclass")
WHEN = pytest.mark.parametrize("when", [SUBCLASS, pytest.param(once, id="callback")])


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
        model = scripted_model(
            tokenizer, by_turn(list(said), [f"bcd{EOS}", call("count", number=5) + EOS], [f"e{EOS}"])
        )
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


def scored() -> dict[str, Any]:
    """The parts of a run with a reward model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(tiny_model("llama", num_labels=1).config)
    return {"reward_funcs": model, "reward_processing_classes": tiny_tokenizer()}


def other_scorer(trainer: Any) -> None:
    first, rest = ["<pad>", "<eos>", "<unk>"], sorted(set(tiny_tokenizer().get_vocab()), reverse=True)
    trainer.reward_processing_classes = [tiny_tokenizer(tokens=[*first, *rest])]


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
    "generation_config": Followed(
        "generation_config", lambda trainer: setattr(trainer.generation_config, "max_new_tokens", 4), spelling
    ),
    "generation_config, another": Followed(
        "generation_config", setting("generation_config", GenerationConfig(max_new_tokens=4, do_sample=True)), spelling
    ),
    "generation_kwargs": Followed("generation_kwargs", setting("generation_kwargs", {"top_k": 1}), differs=False),
    "max_completion_length": Followed("max_completion_length", setting("max_completion_length", 60), talking(), TURNS),
    "max_tool_calling_iterations": Followed(
        "max_tool_calling_iterations", setting("max_tool_calling_iterations", 1), talking(), TURNS
    ),
    "mask_truncated_completions": Followed(
        "mask_truncated_completions",
        setting("mask_truncated_completions", True),
        settings={"max_completion_length": 10},  # as wide as what is sampled: a shorter row has ended
    ),
    "rollout_func": Followed("rollout_func", setting("rollout_func", given_rollout)),
    "reward_funcs": Followed("reward_funcs", setting("reward_funcs", [letter_reward, length_reward]), two_rewards),
    "reward_func_names": Followed("reward_func_names", renamed, two_rewards, differs=False),
    "reward_weights": Followed("reward_weights", setting("reward_weights", torch.tensor([0.1, 5.0])), two_rewards),
    "reward_processing_classes": Followed("reward_processing_classes", other_scorer, scored),
    "scale_rewards": Followed("scale_rewards", setting("scale_rewards", "none"), two_rewards),
    "multi_objective_aggregation": Followed(
        "multi_objective_aggregation", setting("multi_objective_aggregation", "normalize_then_sum"), two_rewards
    ),
    "ref_model": Followed("ref_model", other_reference, settings={"beta": 0.5, "max_steps": 3}),
}


@stock_scores
@WHEN
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_change_is_followed_as_in_trl(tmp_path, name, when):
    case = FOLLOWED[name]
    learns_as_in_trl(tmp_path, when(case.act), case.parts, case.differs, **case.settings)


def test_the_number_of_completions_of_an_evaluation_is_followed(tmp_path):
    scored: list[int] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        scored.append(len(completions))
        return [0.0] * len(completions)

    trainer = make(tmp_path, reward=reward, eval_dataset=prompts(3))
    trainer.num_generations_eval = 2
    trainer.evaluate()
    assert sum(scored) == 6


def test_a_generation_config_without_tokens_samples(tmp_path):
    other = GenerationConfig(max_new_tokens=4, do_sample=True)
    trainer = build(tmp_path, GRPOTrainer, once(setting("generation_config", other)), parts=own_model)
    trainer.train()
    assert log_of(trainer, "completions/max_length")[1] == 4 < log_of(trainer, "completions/max_length")[0]


@WHEN
def test_the_images_of_the_table_are_followed(tmp_path, when):
    def images_of(mixin: type | None) -> int:
        trainer = build(tmp_path / str(mixin), GRPOTrainer, mixin, parts=seeing, log_multimodal=False)
        trainer.train()
        return len(trainer._logs["images"])

    assert images_of(when(setting("log_multimodal", True))) == 16 != images_of(None)


# ---- vLLM -----------------------------------------------------------------------------------------------------------

VLLM = {"use_vllm": True, "vllm_mode": "server", "top_k": 0, "max_steps": 2}
BOUNDS = {"mode": "token_truncate", "clip_min": 0.3, "clip_max": 0.5}


@WHEN
def test_corrections_of_what_vllm_samples_are_followed(tmp_path, monkeypatch, when):
    def bound(trainer: Any) -> None:
        for name, value in BOUNDS.items():
            setattr(trainer, f"vllm_importance_sampling_{name}", value)

    stand_in(tmp_path / "server", monkeypatch.setattr)
    largest = "sampling/importance_sampling_ratio/max"
    trainer = build(tmp_path / "bound", GRPOTrainer, when(bound), parts=own_model, **VLLM)
    trainer.train()
    assert log_of(trainer, largest)[-1] == 0.5
    off = when(setting("vllm_importance_sampling_correction", False))
    trainer = build(tmp_path / "off", GRPOTrainer, off, parts=own_model, **VLLM)
    trainer.train()
    assert len(log_of(trainer, largest)) == (when is once)


@WHEN
@pytest.mark.parametrize("name", ["vllm_generation", "vllm_generation.temperature"])
def test_another_engine_is_refused(tmp_path, monkeypatch, when, name):
    def replaced(trainer: Any) -> None:
        if name == "vllm_generation":
            trainer.vllm_generation = copy.copy(trainer.vllm_generation)
        else:
            trainer.vllm_generation.temperature = 0.5

    stand_in(tmp_path / "server", monkeypatch.setattr)
    lag = AHEAD if name != "vllm_generation" else {}
    with pytest.raises(ConfigError, match=rf"{name} was changed to"):
        build(tmp_path / "o", GRPOTrainer, when(replaced), parts=own_model, **{**VLLM, **lag}).train()


# ---- Overridden -----------------------------------------------------------------------------------------------------


def shouted(trainer: Any) -> None:
    """Assigns a `_get_tool_suffix_ids` that adds a token to TRL's."""
    inner = trainer._get_tool_suffix_ids
    trainer._get_tool_suffix_ids = lambda answers: [*inner(answers), 9]


@stock_scores
@WHEN
def test_the_tokens_of_answers_are_the_users(tmp_path, when):
    learns_as_in_trl(tmp_path, when(shouted), talking(), **TURNS)


# ---- Refused --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A change that is refused.

    Attributes:
        name: what docs/overrides.md calls it, and the error.
        act: makes it.
        in_init: a subclass's `__init__` may make it.
    """

    name: str
    act: Change
    parts: Callable[[], dict[str, Any]] = dict
    settings: dict[str, Any] = field(default_factory=dict)
    says: str = "{} was changed to"
    in_init: bool = False


def two_functions(trainer: Any) -> None:
    trainer.reward_funcs = [*trainer.reward_funcs, *trainer.reward_funcs]


def several_rows(trainer: Any) -> None:
    trainer.generation_config.num_return_sequences = 2


def own_model() -> dict[str, Any]:
    """A model that samples by key."""
    return {"model": tiny_model()}


def seeing() -> dict[str, Any]:
    """A model that takes images."""
    model, rows = image_model("llava"), image_rows(8)
    return {"model": model, "processing_class": image_processor("llava"), "train_dataset": rows}


def reset_reference(trainer: Any) -> None:
    """Moves the reference in place."""
    for parameter in trainer.ref_model.parameters():
        parameter.data.mul_(0.9)


def scored_by_a_model(trainer: Any) -> None:
    trainer.reward_funcs = [AutoModelForSequenceClassification.from_config(tiny_model("llama", num_labels=1).config)]


AHEAD, BITWISE = {"rollout_lag": 1, "max_steps": 4}, {"bitwise_invariant": True, "canonical_unit_size": 4}
AHEAD_SAYS = "rollout_lag=1 and .*{}"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
REFUSED = [
    Refused("num_generations", setting("num_generations", 8)),
    Refused("num_iterations", setting("num_iterations", 2)),
    Refused("args.steps_per_generation", setting("args.steps_per_generation", 2)),
    Refused("use_vllm", setting("use_vllm", True)),
    Refused("vllm_mode", setting("vllm_mode", "server")),
    Refused("use_transformers_continuous_batching", setting("use_transformers_continuous_batching", True)),
    *(Refused(name, setting(name, 0.5)) for name in SAMPLING),
    Refused(
        "suppress_tokens",
        lambda trainer: setattr(trainer.generation_config, "suppress_tokens", [5]),
        own_model,
        {"sampling_mask": "replay", "top_k": 5},
        "{} or min_new_tokens .with sampling_mask. was",
    ),
    Refused("args.sampling_mask", setting("args.sampling_mask", "replay"), own_model, says="or routing_replay was"),
    Refused("pad_to_multiple_of", setting("pad_to_multiple_of", 32)),
    Refused("pad_token_id", lambda trainer: setattr(trainer.processing_class, "pad_token", "<unk>")),
    Refused("beta", setting("beta", 0.1)),
    Refused("reward_funcs", two_functions, says="a change has left ..{}': 2, 'reward_func_names': 1"),
    Refused("generation_config", several_rows, says="num_return_sequences=2 in generation_kwargs"),
    Refused("beta", setting("beta", 0.1), lambda: {"peft_config": LoraConfig(r=2, init_lora_weights=False)}),
    Refused("ref_model", reset_reference, own_model, {**AHEAD, "beta": 0.1}, "the weights of {} was changed to"),
    Refused(
        "tools",
        lambda trainer: trainer.tools.append(later),
        talking(),
        TURNS,
        "{} .asynchronous. was changed to",
    ),
    Refused(
        "environment_factories",
        setting("environment_factories", {None: Counter}),
        talking(),
        TURNS,
        "names in {} was changed to",
    ),
    Refused(
        "environment_factories",
        setting("environment_factories", None),
        playing,
        TURNS,
        "names in {} was changed to",
    ),
    Refused(
        "environment_factories",
        lambda trainer: trainer.environment_factories.update(other=Counter),
        playing,
        TURNS,
        "names in {} was changed to",
    ),
    Refused(
        "processing_class",
        lambda trainer: setattr(trainer, "processing_class", image_processor("llava")),
        says="{} .a processor. was changed to",
    ),
    Refused(
        "chat_template_kwargs",
        setting("chat_template_kwargs", {"style": "curt"}),
        seeing,
        says="processing_class or chat_template was changed to",
        in_init=True,
    ),
    Refused("tools", setting("tools", [count]), seeing, says="{} .of a model that takes images. was"),
    Refused("_generate", setting("_generate", print), seeing, says="an override of .*{} was changed to"),
    Refused("_tool_call_loop", setting("_tool_call_loop", print), says="{} would not be called"),
    Refused("ref_model", other_reference, own_model, {**AHEAD, "beta": 0.1}),
    Refused("_generate_single_turn", setting("_generate_single_turn", print), own_model, AHEAD, AHEAD_SAYS),
    Refused("_get_tool_suffix_ids", setting("_get_tool_suffix_ids", print), own_model, AHEAD, AHEAD_SAYS),
    Refused("rollout_func", setting("rollout_func", given_rollout), own_model, AHEAD, "rollout_lag=1 cannot .*{}"),
    Refused("rollout_func", setting("rollout_func", given_rollout), own_model, BITWISE, "bitwise.* cannot .*{}"),
    Refused("reward_funcs", scored_by_a_model, own_model, BITWISE, "bitwise_invariant=True cannot .* reward model"),
]


@WHEN
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_change_that_cannot_be_followed_is_refused_by_name(tmp_path, case, when):
    trainer = build(tmp_path, GRPOTrainer, when(case.act), parts=case.parts, **case.settings)
    if case.in_init and when is afterwards:
        trainer.train()
        return
    with pytest.raises(ConfigError, match=case.says.format(re.escape(case.name))):
        trainer.train()
    assert trainer.state.global_step == (when is once)


# ---- With a lag -----------------------------------------------------------------------------------------------------


def test_with_a_lag_a_change_acts_on_rollout_batches_that_begin_later(tmp_path):
    """Whatever the speed: a rollout batch that waits for the thread has the settings of its submission."""
    seen: list[tuple[str, int]] = []

    def at_step(state: Any) -> None:
        trainer.chat_template_kwargs["style"] = "abcdef"[state.global_step]
        trainer.processing_class.chat_template = TEMPLATE.replace("<model>", "<model>" + "!" * state.global_step)
        trainer.mask_truncated_completions = state.global_step > 1

    def note(state: Any) -> None:
        text = tokenizer.decode(next(iter(batches[-1]["prompt_ids"])))
        truncated = sum(int(mask.sum()) == 0 for mask in batches[-1]["completion_mask"])
        seen.append((f"{text[1]}{text.count('!')}", min(truncated, 1)))

    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer)
    del model.generate
    parts = {"processing_class": tokenizer, "train_dataset": conversations(), "reward": transcript_reward}
    trainer = make(tmp_path, model, **parts, rollout_lag=1, max_steps=5, rollout_chunk_size=16)
    batches = batches_of(trainer)
    trainer.add_callback(on("on_step_begin", at_step))
    trainer.add_callback(on("on_step_end", note))
    trainer.train()
    assert seen == [("a0", 0), ("a0", 0), ("b1", 0), ("c2", 1), ("d3", 1)]


# ---- The documents --------------------------------------------------------------------------------------------------


def read_by_trl() -> set[str]:
    """The attributes of a trainer that TRL's methods of a rollout read."""
    methods = ("_generate_and_score_completions", "_generate", "_generate_single_turn", "_tool_call_loop")
    methods += ("_calculate_rewards", "_get_tool_suffix_ids", "_tokenize_prompts")
    text = "".join(inspect.getsource(getattr(trl.GRPOTrainer, name)) for name in methods)
    return set(re.findall(r"self\.([a-z][a-z_0-9]*)", text))


# what users have no reason to set, with what it is
LEFT_ALONE = {
    "accelerator": "of the run",
    "args": "sizes of forwards without gradients",
    "async_loop": "started by TRL",
    "continuous_batching_config": "read by TRL's own method",
    "environments": "set at each rollout batch",
    "model": "trained",
    "model_wrapped": "trained",
    "state": "of transformers' loop",
}
ELSEWHERE = {"num_generations_eval", "log_multimodal", "vllm_generation", "_generate_and_score_completions"}
ELSEWHERE |= {f"vllm_importance_sampling_{name}" for name in (*BOUNDS, "correction")}


def test_the_list_of_the_documents_is_tested_and_holds_what_trl_reads():
    page = (Path(ROOT) / "docs" / "overrides.md").read_text()
    rows = [
        line for line in page.split("## Changed attributes")[1].split("\n## ")[0].splitlines() if line.startswith("| ")
    ][1:]
    assert "..." not in "".join(rows)
    documented = set(re.findall(r"`([a-z_0-9.]+)`", "".join(row.split("|")[1] for row in rows)))
    tested = {case.name for case in (*FOLLOWED.values(), *REFUSED)} | ELSEWHERE
    of_losses = {name for names, _, _ in LOSS_CHANGES for name in names.split()}
    assert tested | of_losses == documented | {"_tool_call_loop", "_get_tool_suffix_ids", "_generate_single_turn"}
    assert read_by_trl() - documented - LEFT_ALONE.keys() == set()
