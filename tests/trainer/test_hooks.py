"""What users' code may rely on: what users override or pass counts, on the same completions as in stock TRL.

On one process; beside each a run that must differ. A model may have a `generate` of its own. Tools, environments,
reward functions and a rollout_func are in tests/parity, losses and log-probabilities in test_overrides, refusals with a
lag in test_ahead.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError, ModelError
from grpo_ext.rollouts.batch import RolloutBatch
from tests.parity.scripts import EOS, Journal, by_turn, call, chat_tokenizer, conversations, parts_of
from tests.support.beside_trl import LOSS_CHANGES, build, changing, learns_as_in_trl, log_probs_of, setting
from tests.support.kept import of_stock
from tests.support.own_generate import Sampler
from tests.support.tiny import letter_reward, stock_scores, tiny_model
from tests.support.tool_runs import count, transcript_reward
from tests.support.trainers import LORA, change, error, make, passing_on, train_and_keep_first
from tests.tolerances import DIFFERENT, UPDATE


def overriding(hook: Callable[..., Any]) -> type:
    """A subclass's override of the method that the hook is named after; it is given what `super()` has."""
    name = hook.__name__

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(self, getattr(super(own, self), name), *args, **kwargs)

    own = type("Overriding", (), {name: method})
    return own


def talking() -> dict[str, Any]:
    """The parts of a run with a tool, which every second completion of a group calls."""
    said = by_turn([f"a{EOS}", call("count", number=3) + EOS], [f"bcd{EOS}"])
    usual = {"reward_funcs": transcript_reward, "train_dataset": conversations(), "tools": [count]}
    return parts_of(Journal(), said, chat_tokenizer(), **usual)


def _calculate_rewards(self: Any, inner: Any, inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
    """Other texts are rewarded, and the rewards are changed; gathers as TRL's methods do."""
    rewards = inner(inputs, prompts, [text[:3] for text in completions], ids)
    lengths = self.accelerator.gather(torch.tensor([float(len(row)) for row in ids]))
    assert rewards.shape == (len(lengths), len(self.reward_funcs))
    return rewards**2 - 0.05 * lengths[:, None]


@stock_scores
def test_generate_single_turn_is_called_for_every_turn_of_every_chunk(tmp_path):
    sizes: list[int] = []

    def _generate_single_turn(self: Any, inner: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(prompt_ids))
        ids, logps = inner(prompt_ids, *args, **kwargs)
        return [[9, *row] for row in ids], logps

    mixin = overriding(_generate_single_turn)
    learns_as_in_trl(tmp_path, mixin, talking, max_completion_length=200, max_steps=1)
    sizes.clear()
    build(tmp_path / "o", GRPOTrainer, mixin, parts=talking, max_completion_length=200, max_steps=1).train()
    assert sizes == [8, 8, 4, 4]  # every second completion calls the tool


def with_bonus(prompts: Any, completions: Any, bonus: Any = None, **kwargs: Any) -> list[float]:
    more = [0.0] * len(prompts) if bonus is None else bonus
    return [reward + extra for reward, extra in zip(letter_reward(prompts, completions), more)]


def changed_turns(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout of the user's own: tokens and mask are changed, and a column is added to the rows."""
    output = trainer.generate(prompts)
    output["completion_ids"] = [[*ids, 9, 9] for ids in output["completion_ids"]]
    output["env_mask"] = [[*mask, 1, 0] for mask in output["env_mask"]]
    return {**output, "bonus": [0.2 * (place % 3) for place in range(len(prompts))]}


@pytest.mark.parametrize("prompts", ["ab>", []])
def test_generate_takes_a_list_of_prompts(tmp_path, prompts):
    with pytest.raises(ConfigError, match="takes a list of prompts"):
        build(tmp_path, GRPOTrainer).generate(prompts)


@pytest.mark.full
def test_generate_samples_what_the_trainer_would(tmp_path):
    """By its engine and keys, also with masks to replay; further calls draw other random numbers."""
    seen: list[Any] = []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        first, again = trainer.generate(prompts), trainer.generate(prompts)
        seen.append(sum(a == b for a, b in zip(first["completion_ids"], again["completion_ids"])))
        return first

    def learned(name: str, function: Any = None, size: int = 5, **settings: Any) -> torch.Tensor:
        parts = {"model": tiny_model()} | ({} if function is None else {"rollout_func": function})
        return change(build(tmp_path / name, GRPOTrainer, None, size, lambda: parts, max_steps=1, **settings))

    plain = learned("plain")
    assert torch.equal(plain, learned("same", rollout))
    assert max(seen) <= 2
    assert torch.equal(learned("other size", size=3), learned("function", rollout, size=3))
    masks = {"sampling_mask": "replay", "top_p": 0.8}
    replayed = learned("masks", rollout, **masks)
    assert torch.equal(learned("plain masks", **masks), replayed)
    assert not torch.equal(replayed, learned("no masks", rollout, top_p=0.8))
    assert error(learned("more tokens", changed_turns), plain) > DIFFERENT


def test_generate_outside_of_a_run_samples_any_number_of_prompts(tmp_path):
    trainer = make(tmp_path)
    one, other = (trainer.generate(["abcd>", "ba>", "abcd>"]) for _ in range(2))
    assert one.keys() == {"prompt_ids", "completion_ids", "logprobs", "env_mask"}
    assert [len(mask) for mask in one["env_mask"]] == [len(ids) for ids in one["completion_ids"]]
    assert one["completion_ids"] != other["completion_ids"]
    assert make(tmp_path).generate(["abcd>", "ba>", "abcd>"]) == one


WITHDRAWN = {
    "_generate": r"rollout_func, which may call trainer\.generate",
    "_tokenize_prompts": "chat_template",
    "_get_tool_suffix_ids": "chat_template",
    "_log_metric": "log_metric in reward functions, or log",
    "_tool_call_loop": "_generate_single_turn",
}


@pytest.mark.parametrize("name", WITHDRAWN)
def test_a_method_that_is_not_called_is_refused_with_what_to_use(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"Own\.{name} would not be called.*{WITHDRAWN[name]}"):
        make(tmp_path, cls=type("Own", (GRPOTrainer,), {name: lambda self, *args: None}))


def rebuilt_rows(self: Any, inner: Any, inputs: Any) -> Any:
    """Rows of its own: other prompts, and a column more."""
    return inner([{"prompt": row["prompt"][::-1], "bonus": 0.1 * (i % 3)} for i, row in enumerate(inputs)])


def scored_alone(self: Any, inner: Any, inputs: Any) -> Any:
    ids = [self.processing_class(row["prompt"])["input_ids"] for row in inputs]
    width = max(map(len, ids))
    answers = torch.tensor([[3 + (len(row) + i) % 20, 3 + i, 1] for i, row in enumerate(ids)])
    return {
        "prompt_ids": torch.tensor([[0] * (width - len(row)) + row for row in ids]),
        "prompt_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]),
        "completion_ids": answers,
        "completion_mask": torch.ones_like(answers),
        "advantages": torch.tensor([float(i % 4) - 1.5 for i in range(len(ids))]),
        "num_items_in_batch": torch.tensor(3 * len(ids)),
    }


for scoring in (rebuilt_rows, scored_alone):
    scoring.__name__ = "_generate_and_score_completions"


@stock_scores
@pytest.mark.parametrize("hook", [_calculate_rewards, rebuilt_rows, scored_alone])
def test_what_an_override_of_a_rollout_does_counts_as_in_trl(tmp_path, hook):
    learns_as_in_trl(tmp_path, overriding(hook), lambda: {"reward_funcs": with_bonus}, max_steps=1)


def completions_of(scored: Any) -> list[list[int]]:
    if isinstance(scored, RolloutBatch):
        return [ids.tolist() for ids in scored.completions]
    pairs = zip(scored["completion_ids"], scored["completion_mask"])
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def test_rows_keep_their_random_numbers_in_a_users_scoring_and_further_calls_draw_others(tmp_path):
    found: dict[str, list[list[int]]] = {}

    def _generate_and_score_completions(self: Any, inner: Any, inputs: Any) -> Any:
        first = inner(inputs)
        found["first"], found["again"] = completions_of(first), completions_of(inner(inputs))
        return first

    def more_rows(self: Any, inner: Any, inputs: Any) -> Any:
        longer = inner([*inputs, *inputs[:4]])
        found["longer"] = completions_of(longer)
        return {n: v[:16] if isinstance(v, torch.Tensor) and v.dim() else v for n, v in longer.items()}

    more_rows.__name__ = "_generate_and_score_completions"

    def sampled(name: str, hook: Any = None, seed: int = 3) -> list[list[int]]:
        mixin = None if hook is None else overriding(hook)
        settings = {"max_steps": 1, "seed": seed}
        trainer = build(tmp_path / name, GRPOTrainer, mixin, parts=lambda: {"model": tiny_model()}, **settings)
        return completions_of(train_and_keep_first(trainer))

    plain = sampled("plain")
    assert sampled("twice", _generate_and_score_completions) == plain == found["first"]
    assert sum(a == b for a, b in zip(plain, found["again"])) <= 2
    assert sampled("more", more_rows) == plain == found["longer"][:16]
    assert sum(a == b for a, b in zip(plain, found["longer"][16:])) <= 1
    assert sampled("other", seed=4) != plain


# two steps for a rollout batch: in the second, before which it changes, the policy has moved and clips and ratios act
REUSED: dict[str, Any] = {"num_iterations": 2, "loss_type": "grpo"}


@stock_scores
@pytest.mark.parametrize(("names", "value", "settings"), LOSS_CHANGES, ids=str)
def test_a_setting_that_a_callback_changes_acts_from_then_on(tmp_path, names, value, settings):
    def change(trainer: Any) -> None:
        for name in names.split():
            setting(name, value)(trainer)

    learns_as_in_trl(tmp_path, changing(change, 1), **{**REUSED, **settings})


def test_a_kl_term_without_reference_log_probabilities_is_refused(tmp_path):
    def _generate_and_score_completions(self: Any, inner: Any, inputs: Any) -> Any:
        return {name: value for name, value in inner(inputs).items() if name != "ref_per_token_logps"}

    with pytest.raises(ConfigError, match=r"beta=0\.1 asks for the KL term"):
        build(tmp_path, GRPOTrainer, overriding(_generate_and_score_completions), beta=0.1).train()


def without_the_middle(scored: dict[str, Any]) -> None:
    scored["completion_mask"][::2, 2:4] = 0


def without_part_of_the_prompt(scored: dict[str, Any]) -> None:
    scored["prompt_mask"][1::2, 2] = 0


def with_more_tokens(scored: dict[str, Any]) -> None:
    """Two more for each completion, which carry loss."""
    more = torch.full_like(scored["completion_ids"][:, :2], 9)
    scored["completion_ids"] = torch.cat([scored["completion_ids"], more], dim=1)
    scored["completion_mask"] = torch.cat([scored["completion_mask"], torch.ones_like(more)], dim=1)


def advantages_of_tokens(scored: dict[str, Any]) -> None:
    places = torch.linspace(0.5, 2.0, scored["completion_ids"].size(1))
    scored["advantages"] = scored["advantages"][:, None] * places


def with_fields(scored: dict[str, Any]) -> None:
    """Fields of many shapes, all of which the loss depends on."""
    rows = len(scored["completion_ids"])
    weights = torch.linspace(0.5, 1.5, rows)
    scored["one"] = weights
    scored["few"] = weights[:, None] * torch.tensor([1.0, 0.5, 0.25])
    scored["cube"] = weights[:, None, None] * torch.ones(1, 2, 3)
    scored["tokens"] = scored["completion_ids"] / 20
    scored["texts"] = ["a" * (1 + row % 3) for row in range(rows)]
    scored["shift"] = torch.tensor(0.75)


class OfFields:
    """A loss that depends on all of them."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        assert inputs["one"].shape == inputs["advantages"].shape
        texts = torch.tensor([float(len(text)) for text in inputs["texts"]])
        by_row = inputs["one"] * inputs["few"].sum(1) * inputs["cube"].sum((1, 2)) * texts * inputs["shift"]
        own = (log_probs_of(self, model, inputs) * inputs["tokens"] * inputs["completion_mask"]).sum(1) * by_row
        return super()._compute_loss(model, inputs) + own.mean() / 10 / self.current_gradient_accumulation_steps


# of one length, because stock TRL lets padding move GPT-2's absolute positions
PROMPTS = Dataset.from_dict({"prompt": ["abcd>", "hgfe>", "aceg>", "bdfh>", "afbg>", "chde>", "gabc>", "fhea>"]})
LOGPS = "_get_per_token_logps_and_entropies"


@stock_scores
@pytest.mark.parametrize(
    ("edit", "settings"),
    [
        (without_the_middle, {"kind": "gpt2"}),  # masks move the absolute positions of GPT-2
        (without_part_of_the_prompt, {"kind": "gpt2"}),
        (with_more_tokens, {}),
        (advantages_of_tokens, {}),
        # tokens are left out by every forward
        (without_the_middle, {"loss_type": "grpo", "gradient_checkpointing": True}),
        (without_the_middle, {"loss_type": "dr_grpo", "forward": "prefix"}),
        pytest.param(with_fields, {"loss_type": "grpo", "num_iterations": 2}, marks=pytest.mark.full),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "+".join(value),
)
def test_a_changed_dictionary_is_trained_on_as_stock_trl_does(tmp_path, edit, settings):
    def _generate_and_score_completions(self: Any, inner: Any, inputs: Any) -> Any:
        scored = inner(inputs)
        edit(scored)
        return scored

    mixin = overriding(_generate_and_score_completions)
    if edit is with_fields:
        mixin = type("WithFields", (OfFields, mixin), {})
    settings = {"max_steps": settings.get("num_iterations", 1), **settings}
    learns_as_in_trl(tmp_path, mixin, lambda: {"train_dataset": PROMPTS}, **settings)


class KeepsTheRouterBack:
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(*args, **{**kwargs, "compute_aux_loss": False})


def test_a_hook_that_passes_on_changes_no_bit_of_a_model_with_experts(tmp_path):
    parts = {"size": 5, "kind": "moe", "max_steps": 1}
    plain = change(build(tmp_path / "plain", GRPOTrainer, **parts))
    assert torch.equal(plain, change(build(tmp_path / "passing", passing_on(LOGPS), **parts)))
    with pytest.raises(ModelError, match=f"{LOGPS} pass on compute_aux_loss"):
        build(tmp_path / "back", GRPOTrainer, KeepsTheRouterBack, **parts).train()


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
