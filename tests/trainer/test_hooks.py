"""What users' code may rely on: what users override or pass counts, on the same completions as in stock TRL.

A test for each row of the table in docs/overrides.md, on one process; beside each a run that must differ. What an
override of `_generate_and_score_completions` may change in TRL's dictionary is in test_overridden_rollouts, settings of
the loss that change during a run are in test_live_settings, losses and log-probabilities in test_overrides, refusals
with a lag in test_ahead_beside_users.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import trl

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.errors import ConfigError, RolloutError
from tests.support.drop_in import TOOL_CALL, CountingGame, conversations
from tests.support.own_generate import Sampler, apart, change
from tests.support.tiny import (
    config_kwargs,
    given_rollout,
    letter_reward,
    prompts,
    stock_scores,
    tiny_model,
    tiny_tokenizer,
)
from tests.tolerances import ADAM_EPSILON, DIFFERENT, UPDATE

SETTINGS: dict[str, Any] = {"shuffle_dataset": False, "adam_epsilon": ADAM_EPSILON, "learning_rate": 1e-2}
SPLITS = (16, 5)  # micro-batches of so many completions
Parts = Callable[[], dict[str, Any]]
Mixin = type | None


def build(folder: Any, base: type, mixin: Mixin = None, size: int = 16, parts: Parts = dict, **settings: Any) -> Any:
    """A trainer of TRL's or ours; both sample the same completions, because the model's own `generate` does it.

    Args:
        mixin: the user's overrides.
        parts: arguments of the trainer in place of those here; a model is left as it is.
    """
    cls = type("Own", (mixin, base), {}) if mixin else base
    kwargs = config_kwargs(folder, **{**SETTINGS, "per_device_train_batch_size": size, **settings})
    config: Any = GRPOConfig
    if not issubclass(base, GRPOTrainer):
        config = trl.GRPOConfig
        del kwargs["global_batch_size"], kwargs["rollout_chunk_size"]
    given = parts()
    if "model" not in given:
        given["model"] = tiny_model()
        given["model"].generate = Sampler()
    usual = {
        "reward_funcs": letter_reward,
        "train_dataset": prompts(8),
        "processing_class": tiny_tokenizer(),
    }
    return cls(args=config(**kwargs), **{**usual, **given})


def learns_as_in_trl(
    folder: Any, mixin: Mixin, parts: Parts = dict, control: tuple[Mixin, Parts] | None = None, **settings: Any
) -> None:
    """Assert that overrides and parts count, and as in stock TRL, whatever the split.

    Args:
        control: of a run that must differ; by default without the overrides.
    """
    stock = change(build(folder / "stock", trl.GRPOTrainer, mixin, parts=parts, **settings))
    without, others = control or (None, parts)
    assert apart(stock, change(build(folder / "o", trl.GRPOTrainer, without, parts=others, **settings))) > DIFFERENT
    for size in SPLITS:
        ours = change(build(folder / f"{size}", GRPOTrainer, mixin, size, parts, **settings))
        assert apart(stock, ours) < UPDATE, size


# ---- Overridden or assigned -----------------------------------------------------------------------------------------


def overriding(hook: Callable[..., Any]) -> type:
    """A subclass's override of the method that the hook is named after; it is given what `super()` has."""
    name = hook.__name__

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(self, getattr(super(own, self), name), *args, **kwargs)

    own = type("Overriding", (), {name: method})
    return own


def assigning(hook: Callable[..., Any]) -> type:
    """The same, assigned to the trainer once it is built."""

    class Assigning:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            name = hook.__name__
            setattr(self, name, functools.partial(hook, self, getattr(self, name)))

    return Assigning


both = pytest.mark.parametrize("put", [overriding, assigning])
# one method of the trainer finds all overrides, assigned or not
overridden = pytest.mark.parametrize("put", [overriding, pytest.param(assigning, marks=pytest.mark.full)])


# ---- What is passed -------------------------------------------------------------------------------------------------


async def length_later(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [0.3 * (len(text) % 3) for text in completions]


def some_alone(prompts: Any, completions: Any, **kwargs: Any) -> list[float | None]:
    return [None if len(text) % 3 == 0 else float("a" in text) for text in completions]


def rewarded(seed: int = 3) -> dict[str, Any]:
    """A function, an asynchronous one, one that does not apply to all, and a model."""
    config = tiny_model("llama").config
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        scorer = transformers.AutoModelForSequenceClassification.from_config(config)
    scorer.config._name_or_path = "scorer"
    funcs = [letter_reward, length_later, some_alone, scorer]
    return {"reward_funcs": funcs, "reward_processing_classes": [None, None, None, tiny_tokenizer()]}


@stock_scores
def test_reward_functions_of_every_kind_count_as_in_trl(tmp_path):
    weights = [1.0, 0.5, 2.0, 3.0]
    learns_as_in_trl(tmp_path, None, rewarded, (None, lambda: rewarded(4)), reward_weights=weights)


@stock_scores
def test_a_rollout_func_counts_as_in_trl(tmp_path):
    learns_as_in_trl(tmp_path, None, lambda: {"rollout_func": given_rollout}, (None, dict))


class Caller:
    """A `generate` that calls a tool at every second place of a group, and ends once it is answered."""

    def __init__(self, tokenizer: Any, calls: bool) -> None:
        self.tokenizer, self.calls = tokenizer, calls

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask)]
        answers = []
        for place, ids in enumerate(rows):
            number = rows[:place].count(ids)  # among the completions that begin alike
            answered = "<tool_response>" in self.tokenizer.decode(ids)
            calls = self.calls and number % 2 and not answered
            text = TOOL_CALL if calls else "abcdefgh"[: 1 + (number + sum(ids)) % 5]
            answers.append(self.tokenizer(text + "<|im_end|>")["input_ids"])
        width = max(map(len, answers))
        padded = [answer + [self.tokenizer.pad_token_id] * (width - len(answer)) for answer in answers]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)


def guess(number: int) -> str:
    """Guess a number.

    Args:
        number: The guess.
    """
    return "higher" if number < 5 else "lower"


def talk_reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [sum(0.1 * len(message.get("content", "")) for message in talk) + len(talk) for talk in completions]


def talking(tokenizer: Any, calls: bool = True, **more: Any) -> Parts:
    """The parts of a run with tools or environments."""

    def parts() -> dict[str, Any]:
        model = tiny_model(max_position_embeddings=4096)
        with torch.random.fork_rng():
            torch.manual_seed(0)  # of the embeddings that are added
            model.resize_token_embeddings(len(tokenizer))
        model.generate = Caller(tokenizer, calls)
        usual = {"reward_funcs": talk_reward, "train_dataset": conversations(), "processing_class": tokenizer}
        return {"model": model, **usual, **more}

    return parts


TOOLS = [{"tools": [guess]}, {"environment_factory": CountingGame}]


@stock_scores
@pytest.mark.parametrize("given", TOOLS, ids=["tools", "environment_factory"])
def test_tools_and_environments_count_as_in_trl(tmp_path, tool_tokenizer, given):
    parts, silent = (talking(tool_tokenizer, calls, **given) for calls in (True, False))
    learns_as_in_trl(tmp_path, None, parts, (None, silent), max_completion_length=200)


def test_generation_kwargs_and_callbacks_are_taken(tmp_path):
    seen: list[int] = []

    class Seen(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(state.global_step)

    asked = []
    for given in ({}, {"no_repeat_ngram_size": 3}):
        trainer = build(tmp_path, GRPOTrainer, parts=lambda: {"callbacks": [Seen()]}, generation_kwargs=given)
        trainer.train()
        asked.append({call["generation_config"].no_repeat_ngram_size for call in trainer.model.generate.given})
    assert asked[1] == {3} != asked[0]
    assert seen == [1, 2] * 2


# ---- Rewards --------------------------------------------------------------------------------------------------------


def _calculate_rewards(self: Any, inner: Any, inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
    """Other texts are rewarded, and the rewards are changed; gathers as TRL's methods do."""
    rewards = inner(inputs, prompts, [text[:3] for text in completions], ids)
    lengths = self.accelerator.gather(torch.tensor([float(len(row)) for row in ids]))
    assert rewards.shape == (len(lengths), len(self.reward_funcs))
    return rewards**2 - 0.05 * lengths[:, None]


@stock_scores
@both
def test_calculate_rewards_makes_the_rewards(tmp_path, put):
    learns_as_in_trl(tmp_path, put(_calculate_rewards))


@overridden
def test_calculate_rewards_works_with_a_lag(tmp_path, put):
    """The same as a reward function that shapes by itself."""
    where = set()

    def _calculate_rewards(self: Any, inner: Any, *args: Any) -> torch.Tensor:
        where.add(threading.current_thread().name)
        return inner(*args) ** 2

    def squared(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        return (torch.tensor(letter_reward(prompts, completions)) ** 2).tolist()

    def trained(name: str, mixin: Mixin = None, **more: Any) -> torch.Tensor:
        parts = {"model": tiny_model(), **more}
        return change(build(tmp_path / name, GRPOTrainer, mixin, parts=lambda: parts, rollout_lag=1, max_steps=3))

    shaped = trained("shaped", put(_calculate_rewards))
    assert where == {"MainThread"}
    assert apart(shaped, trained("function", reward_funcs=squared)) < UPDATE
    assert apart(shaped, trained("plain")) > DIFFERENT


# ---- Sampling -------------------------------------------------------------------------------------------------------


def _generate_single_turn(self: Any, inner: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """Sampled from other tokens, and one token less is kept."""
    ids, logps = inner([[7, *row] for row in prompt_ids], *args, **kwargs)
    return [row[:-1] or row for row in ids], logps


@stock_scores
@both
def test_generate_single_turn_samples(tmp_path, put):
    learns_as_in_trl(tmp_path, put(_generate_single_turn))


@stock_scores
@overridden
def test_generate_single_turn_is_called_for_every_turn_of_every_chunk(tmp_path, tool_tokenizer, put):
    sizes: list[int] = []

    def _generate_single_turn(self: Any, inner: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(prompt_ids))
        ids, logps = inner(prompt_ids, *args, **kwargs)
        return [[9, *row] for row in ids], logps

    parts, mixin = talking(tool_tokenizer, tools=[guess]), put(_generate_single_turn)
    learns_as_in_trl(tmp_path, mixin, parts, max_completion_length=200)
    sizes.clear()
    build(tmp_path / "o", GRPOTrainer, mixin, parts=parts, max_completion_length=200, max_steps=1).train()
    assert sizes == [8, 8, 4, 4]  # every second completion calls the tool


def _tokenize_prompts(self: Any, inner: Any, prompts: Any) -> Any:
    ids, *others = inner(prompts)
    return [[5, *row] for row in ids], *others


@stock_scores
@overridden
def test_tokenize_prompts_makes_the_tokens_of_prompts(tmp_path, put):
    learns_as_in_trl(tmp_path, put(_tokenize_prompts))


@overridden
def test_tokenize_prompts_is_called_once_for_a_rollout_with_the_different_prompts(tmp_path, put):
    seen: list[list[str]] = []

    def _tokenize_prompts(self: Any, inner: Any, prompts: Any) -> Any:
        seen.append(list(prompts))
        return inner(prompts)

    trainer = build(tmp_path, GRPOTrainer, put(_tokenize_prompts))
    seen.clear()  # of the lengths, which are checked when a trainer is built
    trainer.train()
    rows = prompts(8)["prompt"]
    assert seen == [list(rows[:4]), list(rows[4:])]


def _generate(self: Any, inner: Any, prompts: Any) -> Any:
    """Of TRL's eight values tokens and mask are changed, and columns are added to the rows."""
    assert len(prompts) == 16
    prompt_ids, ids, _, texts, logps, _, images, tool_images = inner(prompts)
    ids = [[*row, 9, 9] for row in ids]
    masks = [[1] * (len(row) - 1) + [0] for row in ids]
    fields = {"bonus": [0.2 * (place % 3) for place in range(len(prompts))]}
    return prompt_ids, ids, masks, texts, logps, fields, images, tool_images


def generate_alone(self: Any, inner: Any, prompts: Any) -> Any:
    """Nothing of TRL's is called."""
    prompt_ids = [self.processing_class(prompt)["input_ids"] for prompt in prompts]
    ids = [[3 + (len(row) + 5 * i) % 20] * (1 + i % 4) + [1] for i, row in enumerate(prompt_ids)]
    texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
    return prompt_ids, ids, None, texts, None, {}, None, []


generate_alone.__name__ = "_generate"


def with_bonus(prompts: Any, completions: Any, bonus: Any = None, **kwargs: Any) -> list[float]:
    more = [0.0] * len(prompts) if bonus is None else bonus
    return [reward + extra for reward, extra in zip(letter_reward(prompts, completions), more)]


@stock_scores
@overridden
@pytest.mark.parametrize("hook", [_generate, generate_alone], ids=["changed", "alone"])
def test_generate_makes_the_completions(tmp_path, put, hook):
    learns_as_in_trl(tmp_path, put(hook), lambda: {"reward_funcs": with_bonus})


@pytest.mark.parametrize(
    ("found", "words"),
    [(([], []), "returned 2 values; return the tuple of 8"), (([],) * 8, "returned 0 completions for 16 prompts")],
    ids=["two", "none"],
)
def test_generate_that_returns_something_else_is_an_error(tmp_path, found, words):
    def _generate(self: Any, inner: Any, prompts: Any) -> Any:
        return found

    with pytest.raises(RolloutError, match=words):
        build(tmp_path, GRPOTrainer, overriding(_generate)).train()


# ---- The whole rollout ----------------------------------------------------------------------------------------------


def rebuilt_rows(self: Any, inner: Any, inputs: Any) -> Any:
    """Rows of its own: other prompts, and a column more."""
    return inner([{"prompt": row["prompt"][::-1], "bonus": 0.1 * (i % 3)} for i, row in enumerate(inputs)])


def scored_alone(self: Any, inner: Any, inputs: Any) -> Any:
    """Nothing of TRL's is called."""
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


def own_metric(self: Any, inner: Any, inputs: Any) -> Any:
    """Uses what it is given, logs, gathers, and changes advantages."""
    scored = inner(inputs)
    everyone = self.accelerator.gather(scored["advantages"])
    assert everyone.shape == (16,)
    self._metrics["train"]["own"].append(everyone.abs().mean().item())
    scored["advantages"] = scored["advantages"] * everyone.abs().mean() + 0.1
    return scored


for scoring in (rebuilt_rows, scored_alone, own_metric):
    scoring.__name__ = "_generate_and_score_completions"


@stock_scores
@overridden
@pytest.mark.parametrize("hook", [rebuilt_rows, scored_alone, own_metric], ids=["rows", "alone", "metric"])
def test_generate_and_score_completions_makes_the_rollout(tmp_path, put, hook):
    learns_as_in_trl(tmp_path, put(hook), lambda: {"reward_funcs": with_bonus})


def completions_of(scored: dict[str, Any]) -> list[list[int]]:
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
        trainer.train()
        return completions_of(vars(trainer._rollouts.batch))

    plain = sampled("plain")
    assert sampled("twice", _generate_and_score_completions) == plain == found["first"]
    assert sum(a == b for a, b in zip(plain, found["again"])) <= 2
    assert sampled("more", more_rows) == plain == found["longer"][:16]
    assert sum(a == b for a, b in zip(plain, found["longer"][16:])) <= 1
    assert sampled("other", seed=4) != plain


# ---- Attributes that a rollout reads --------------------------------------------------------------------------------


def changing(name: str, value: Any) -> type:
    """A callback of the user's sets an attribute after the first step."""

    class Changes(transformers.TrainerCallback):
        trainer: Any

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            setattr(self.trainer, name, value)

    class Changing:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            callback = Changes()
            callback.trainer = self
            self.add_callback(callback)

    return Changing


@stock_scores
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward_weights", torch.tensor([0.1, 5.0])),
        ("mask_truncated_completions", True),
        ("scale_rewards", "none"),
        ("multi_objective_aggregation", "normalize_then_sum"),
        ("reward_funcs", [letter_reward, lambda completions, **kwargs: [float(len(text)) for text in completions]]),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_an_attribute_that_is_read_at_each_rollout_acts_once_it_is_changed(tmp_path, name, value):
    learns_as_in_trl(tmp_path, changing(name, value), lambda: {"reward_funcs": [letter_reward, some_alone]})


def test_a_change_that_cannot_be_followed_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"num_generations was changed to 8 .* planned with 4"):
        build(tmp_path, GRPOTrainer, changing("num_generations", 8)).train()


# ---- What is refused ------------------------------------------------------------------------------------------------


@both
def test_tool_call_loop_is_refused_by_name_before_training(tmp_path, tool_tokenizer, put):
    def _tool_call_loop(self: Any, inner: Any, *args: Any) -> Any:
        raise AssertionError("called")

    with pytest.raises(ConfigError, match=r"_tool_call_loop would not be called.*_generate_single_turn .* _generate "):
        build(tmp_path, GRPOTrainer, put(_tool_call_loop), parts=talking(tool_tokenizer, tools=[guess])).train()
