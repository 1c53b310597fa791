"""What users change once a trainer is built acts at the next rollout batch, as in stock TRL, or is refused by name.

Each change is made by a subclass after `super().__init__()`, and by a callback in mid-run. The list is that of
docs/overrides.md; its settings of the loss are in test_hooks.
"""

import copy
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from tests.parity.scripts import (
    EOS,
    TEMPLATE,
    Journal,
    by_turn,
    call,
    chat_tokenizer,
    conversations,
    letters,
    parts_of,
    scripted_model,
)
from tests.support.beside_trl import LOSS_CHANGES, build, changing, learns_as_in_trl, setting
from tests.support.images import image_model, image_processor, image_rows
from tests.support.launch import ROOT
from tests.support.selection import few_of
from tests.support.server import stand_in
from tests.support.tiny import (
    given_rollout,
    letter_reward,
    prompts,
    sparse_reward,
    stock_scores,
    tiny_model,
    tiny_scorer,
    tiny_tokenizer,
    tool,
)
from tests.support.tool_runs import count, transcript_reward
from tests.support.trainers import log_of, make, ran, watched

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


@tool
def double(number: int) -> str:
    return str(2 * number)


@tool
async def later(number: int) -> str:
    return str(number)


def talking(*replies: str) -> Callable[[], dict[str, Any]]:
    """The parts of a run whose completions call tools in their first turn."""

    def parts() -> dict[str, Any]:
        first = replies or (f"a{EOS}", call("count", number=3) + EOS)
        said = by_turn([*first], [f"bcd{EOS}", call("count", number=5) + EOS], [f"e{EOS}"])
        usual = {"reward_funcs": transcript_reward, "train_dataset": conversations(), "tools": [count]}
        return parts_of(Journal(), said, chat_tokenizer(), **usual)

    return parts


def spelling() -> dict[str, Any]:
    """The parts of a run that speaks letters until it is cut."""
    return {"model": scripted_model(chat_tokenizer(), letters), "processing_class": chat_tokenizer()}


def length_reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def two_rewards() -> dict[str, Any]:
    return {"reward_funcs": [letter_reward, sparse_reward]}


class Counter:
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


def test_a_lag_reads_two_parameters_of_a_fixed_reference(tmp_path, monkeypatch):
    """What moves a reference moves all of it, so a rollout batch does not cost a sum of each parameter."""
    trainer, sums = make(tmp_path, tiny_model(), beta=0.1, rollout_lag=1, max_steps=2), []
    inner = torch.Tensor.sum
    reference = {parameter.data_ptr() for parameter in trainer.ref_model.parameters()}

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sums.extend([tensor.data_ptr()] if tensor.data_ptr() in reference else [])
        return inner(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sum", counted)
    trainer.train()
    assert len(set(sums)) == 2 < len(reference)
    assert len(sums) == 2 * 2  # of each rollout batch


def scored() -> dict[str, Any]:
    """The parts of a run with a reward model."""
    return {"reward_funcs": tiny_scorer(), "reward_processing_classes": tiny_tokenizer()}


def other_scorer(trainer: Any) -> None:
    first, rest = ["<pad>", "<eos>", "<unk>"], sorted(set(tiny_tokenizer().get_vocab()), reverse=True)
    trainer.reward_processing_classes = [tiny_tokenizer(tokens=[*first, *rest])]


TURNS = {"max_completion_length": 200}


TALKING = talking()
DOUBLES = talking(call("double", number=4) + EOS, call("count", number=3) + EOS)
CUT = {"max_completion_length": 10}  # as wide as what is sampled: a shorter row has ended
# settings of a rollout batch that are followed, by the names of docs/overrides.md (the first word): the change, the
# parts of the run, its settings
FOLLOWED: dict[str, tuple[Any, ...]] = {
    "chat_template": (setting("chat_template", OTHER), TALKING, TURNS),
    "chat_template_kwargs": (setting("chat_template_kwargs", {"style": "curt"}), TALKING, TURNS),
    "chat_template_kwargs in place": (
        lambda trainer: trainer.chat_template_kwargs.update(style="rude"),
        TALKING,
        TURNS,
    ),
    "processing_class": (other_tokenizer, TALKING, TURNS),
    "processing_class in place": (setting("processing_class.chat_template", OTHER), TALKING, TURNS),
    "tools": (lambda trainer: trainer.tools.append(double), DOUBLES, TURNS),
    "environment_factories": (other_environments, playing, TURNS),
    "eos_token_ids": (setting("eos_token_ids", [1, 5, 7]),),
    "generation_config": (setting("generation_config.max_new_tokens", 4), spelling),
    "generation_kwargs": (setting("generation_kwargs", {"top_k": 1}),),
    "max_completion_length": (setting("max_completion_length", 60), TALKING, TURNS),
    "max_tool_calling_iterations": (setting("max_tool_calling_iterations", 1), TALKING, TURNS),
    "mask_truncated_completions": (setting("mask_truncated_completions", True), dict, CUT),
    "rollout_func": (setting("rollout_func", given_rollout),),
    "reward_funcs": (setting("reward_funcs", [letter_reward, length_reward]), two_rewards),
    "reward_func_names": (setting("reward_func_names", ["first", "second"]), two_rewards),
    "reward_weights": (setting("reward_weights", torch.tensor([0.1, 5.0])), two_rewards),
    "reward_processing_classes": (other_scorer, scored),
    "scale_rewards": (setting("scale_rewards", "none"), two_rewards),
    "multi_objective_aggregation": (setting("multi_objective_aggregation", "normalize_then_sum"), two_rewards),
    "ref_model": (other_reference, dict, {"beta": 0.5, "max_steps": 3}),
}
# of sampling, ends, rewards and the reference
FEW = {
    *("eos_token_ids", "generation_config", "rollout_func", "mask_truncated_completions"),
    *("reward_funcs", "scale_rewards", "ref_model"),
}
LEARN_THE_SAME = {"generation_kwargs", "reward_func_names"}  # as without the change


@stock_scores
@WHEN
@pytest.mark.parametrize("name", few_of(FOLLOWED, FEW))
def test_a_change_is_followed_as_in_trl(tmp_path, name, when):
    act, parts, settings = FOLLOWED[name] + (None, dict, {})[len(FOLLOWED[name]) :]
    learns_as_in_trl(tmp_path, when(act), parts, name not in LEARN_THE_SAME, **settings)


def test_the_number_of_completions_of_an_evaluation_is_followed(tmp_path):
    scored: list[int] = []
    reward = watched(lambda completions, **columns: scored.append(len(completions)))
    trainer = make(tmp_path, reward=reward, eval_dataset=prompts(3))
    trainer.num_generations_eval = 2
    trainer.evaluate()
    assert sum(scored) == 6


@pytest.mark.full
def test_the_images_of_the_table_are_followed(tmp_path):
    trainer = build(tmp_path, GRPOTrainer, once(setting("log_multimodal", True)), parts=seeing, log_multimodal=False)
    trainer.train()
    assert len(trainer._logs["images"]) == 16


VLLM = {"use_vllm": True, "vllm_mode": "server", "top_k": 0, "max_steps": 2}
BOUNDS = {"mode": "token_truncate", "clip_min": 0.3, "clip_max": 0.5}


@WHEN
@pytest.mark.full
def test_corrections_of_what_vllm_samples_are_followed(tmp_path, monkeypatch, when):
    def bound(trainer: Any) -> None:
        for name, value in BOUNDS.items():
            setattr(trainer, f"vllm_importance_sampling_{name}", value)

    stand_in(tmp_path / "server", monkeypatch.setattr)
    largest = "sampling/importance_sampling_ratio/max"
    trainer = ran(build(tmp_path / "bound", GRPOTrainer, when(bound), parts=own_model, **VLLM))
    assert log_of(trainer, largest)[-1] == 0.5
    off = when(setting("vllm_importance_sampling_correction", False))
    trainer = ran(build(tmp_path / "off", GRPOTrainer, off, parts=own_model, **VLLM))
    assert len(log_of(trainer, largest)) == (when is once)


@WHEN
@pytest.mark.parametrize(
    ("name", "value", "lag"), [("vllm_generation", print, 0), ("vllm_generation.temperature", 0.5, 1)]
)
def test_another_engine_is_refused(tmp_path, monkeypatch, when, name, value, lag):
    stand_in(tmp_path / "server", monkeypatch.setattr)
    settings = {**VLLM, "rollout_lag": lag, "max_steps": 4}
    with pytest.raises(ConfigError, match=rf"{name} was changed to"):
        build(tmp_path / "o", GRPOTrainer, when(setting(name, value)), parts=own_model, **settings).train()


def own_model() -> dict[str, Any]:
    return {"model": tiny_model()}


def seeing() -> dict[str, Any]:
    model, rows = image_model("llava"), image_rows(8)
    return {"model": model, "processing_class": image_processor("llava"), "train_dataset": rows}


def reset_reference(trainer: Any) -> None:
    for parameter in trainer.ref_model.parameters():
        parameter.data.mul_(0.9)


AHEAD, BITWISE = {"rollout_lag": 1, "max_steps": 4}, {"bitwise_invariant": True, "canonical_unit_size": 4}
AHEAD_SAYS, IN_INIT = "rollout_lag=1 and .*{}", "processing_class or chat_template was changed to"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
CHANGED = "{} was changed to"
NAMES = "names in {} was changed to"
FACTORIES = "environment_factories"
MASKED = {"sampling_mask": "replay", "top_k": 5}


def refused(name: str, act: Change, parts: Any = dict, says: str = CHANGED, **settings: Any) -> Any:
    """A change that is refused: what docs/overrides.md and the error call it, and what the error says of it."""
    return pytest.param(name, act, parts, says, settings, id=name)


REFUSED = [
    refused("num_generations", setting("num_generations", 8)),
    refused("num_iterations", setting("num_iterations", 2)),
    refused("args.steps_per_generation", setting("args.steps_per_generation", 2)),
    refused("use_vllm", setting("use_vllm", True)),
    refused("vllm_mode", setting("vllm_mode", "server")),
    refused("use_transformers_continuous_batching", setting("use_transformers_continuous_batching", True)),
    *(refused(name, setting(name, 0.5)) for name in SAMPLING),
    refused(
        *("suppress_tokens", setting("generation_config.suppress_tokens", [5]), own_model),
        **{"says": "{} or min_new_tokens .with sampling_mask. was", **MASKED},
    ),
    refused("args.sampling_mask", setting("args.sampling_mask", "replay"), own_model, "or routing_replay was"),
    refused("pad_to_multiple_of", setting("pad_to_multiple_of", 32)),
    refused("pad_token_id", setting("processing_class.pad_token", "<unk>")),
    refused("beta", setting("beta", 0.1)),
    refused("reward_funcs", lambda t: t.reward_funcs.extend(t.reward_funcs), says="a change has left ..{}': 2, 'rew"),
    refused(
        "generation_config", setting("generation_config.num_return_sequences", 2), says="num_return_sequences=2 in"
    ),
    refused("beta", setting("beta", 0.1), lambda: {"peft_config": LoraConfig(r=2, init_lora_weights=False)}),
    refused("ref_model", reset_reference, own_model, "the weights of {} was changed to", **AHEAD, beta=0.1),
    refused("tools", lambda trainer: trainer.tools.append(later), talking(), "{} .asynchronous. was", **TURNS),
    refused(FACTORIES, setting(FACTORIES, {None: Counter}), talking(), NAMES, **TURNS),
    refused("processing_class", setting("processing_class", image_processor("llava")), says="{} .a processor. was"),
    refused("chat_template_kwargs", setting("chat_template_kwargs", {"style": "curt"}), seeing, IN_INIT),
    refused("tools", setting("tools", [count]), seeing, "{} .of a model that takes images. was"),
    refused("_tool_call_loop", setting("_tool_call_loop", print), says="{} would not be called"),
    refused("ref_model", other_reference, own_model, **AHEAD, beta=0.1),
    refused("_generate_single_turn", setting("_generate_single_turn", print), own_model, AHEAD_SAYS, **AHEAD),
    refused("_get_tool_suffix_ids", setting("_get_tool_suffix_ids", print), says="{} would not be called"),
    refused("rollout_func", setting("rollout_func", given_rollout), own_model, "rollout_lag=1 cannot .*{}", **AHEAD),
    refused("rollout_func", setting("rollout_func", given_rollout), own_model, "bitwise.* cannot .*{}", **BITWISE),
    refused(
        "reward_funcs",
        setting("reward_funcs", [tiny_scorer()]),
        own_model,
        "bitwise.* cannot .* reward model",
        **BITWISE,
    ),
]


@WHEN
@pytest.mark.parametrize(("name", "act", "parts", "says", "settings"), REFUSED)
def test_a_change_that_cannot_be_followed_is_refused_by_name(tmp_path, name, act, parts, says, settings, when):
    trainer = build(tmp_path, GRPOTrainer, when(act), parts=parts, **settings)
    if says == IN_INIT and when is afterwards:  # a subclass's `__init__` may make it
        trainer.train()
        return
    with pytest.raises(ConfigError, match=says.format(re.escape(name))):
        trainer.train()
    assert trainer.state.global_step == (when is once)


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
ELSEWHERE = {"num_generations_eval", "log_multimodal", "vllm_generation"}
ELSEWHERE |= {f"vllm_importance_sampling_{name}" for name in (*BOUNDS, "correction")}


def test_the_list_of_the_documents_is_tested_and_holds_what_trl_reads():
    page = (Path(ROOT) / "docs" / "overrides.md").read_text()
    rows = [
        line for line in page.split("## Changed attributes")[1].split("\n## ")[0].splitlines() if line.startswith("| ")
    ][1:]
    assert "..." not in "".join(rows)
    documented = set(re.findall(r"`([a-z_0-9.]+)`", "".join(row.split("|")[1] for row in rows)))
    tested = {name.split()[0] for name in FOLLOWED} | {str(case.values[0]) for case in REFUSED} | ELSEWHERE
    of_losses = {name for names, _, _ in LOSS_CHANGES for name in names.split()}
    assert {name for name in tested | of_losses if not name.startswith("_")} == documented  # methods: another table
    assert read_by_trl() - documented - LEFT_ALONE.keys() == set()
