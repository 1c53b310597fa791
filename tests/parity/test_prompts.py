"""From rows to prompts: environments, observations, templates, columns; as in stock TRL."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from datasets import Dataset

from tests.parity.harness import GROUP, ROWS, assert_alike, side_by_side
from tests.parity.scripts import (
    EOS,
    MODEL,
    Journal,
    by_turn,
    call,
    chat_tokenizer,
    conversations,
    game,
    letters,
    scripted_model,
    shop,
    tokens_of,
    writing_reward,
)
from tests.support.tiny import prompts, stock_scores, tiny_model, tiny_tokenizer

pytestmark = stock_scores
PLAYS = by_turn([f"a{EOS}", call("guess", number=3) + EOS, call("buy", thing="x") + EOS], [f"ok{EOS}", "so"])
LONG = {"max_completion_length": 200}


def playing(journal: Journal, dataset: Dataset, environments: Any, **parts: Any) -> dict[str, Any]:
    tokenizer = chat_tokenizer()
    return {
        "model": scripted_model(tokenizer, PLAYS),
        "processing_class": tokenizer,
        "train_dataset": dataset,
        "environment_factory": environments,
        "reward_funcs": writing_reward(journal),
        **parts,
    }


def both_kinds(journal: Journal) -> dict[str, type]:
    return {"game": game(journal), "shop": shop(journal)}


def test_rows_without_a_prompt_get_it_from_their_environment_and_reset_sees_no_placeholder(tmp_path):
    rows = Dataset.from_dict({"environment": ["game", "shop"], "hint": ["go", "stay"]})
    sides = side_by_side(tmp_path, lambda journal: playing(journal, rows, both_kinds(journal)), **LONG)
    assert {frozenset(row) for _, _, row in sides.stock.journal.of("reset")} == {frozenset({"hint"})}
    assert_alike(sides)


def test_reset_gets_the_column_environment_where_there_is_one_factory(tmp_path):
    rows = conversations(2, environment=["game", "shop"], level=[1, 2])
    sides = side_by_side(tmp_path, lambda journal: playing(journal, rows, game(journal)), **LONG)
    columns = {"prompt", "level", "environment"}
    assert {frozenset(row) for _, _, row in sides.stock.journal.of("reset")} == {frozenset(columns)}
    assert_alike(sides)


def test_environments_of_two_kinds_show_their_tools_and_may_give_the_rewards_at_once_and_later(tmp_path):
    rows = conversations(2, environment=["game", "shop"], level=[1, 2])
    sides = side_by_side(tmp_path, lambda journal: playing(journal, rows, both_kinds(journal), reward_funcs=[]), **LONG)
    assert {frozenset(row) for _, _, row in sides.stock.journal.of("reset")} == {frozenset({"prompt", "level"})}
    texts = tokens_of(sides.stock.outputs[0][1], chat_tokenizer())
    assert {text.split("u:")[0] for text in texts[:GROUP]} == {"[guess]"}
    assert {text.split("u:")[0] for text in texts[GROUP:]} == {"[buy]"}
    assert len(sides.stock.journal.of("get_reward")) == len(sides.stock.journal.of("async get_reward")) == GROUP
    assert sides.stock.metrics[0][1]["rewards/Shop/mean"][0] > 0
    assert_alike(sides)


@pytest.mark.parametrize("parts", [False, True], ids=["text", "parts"])
def test_an_observation_becomes_part_of_the_last_message(tmp_path, parts):
    contents = [[{"type": "text", "text": text}] if parts else text for text in "abc"]
    messages = [[{"role": "system", "content": contents[2]}, {"role": "user", "content": one}] for one in contents]
    rows = Dataset.from_dict({"prompt": [*messages, messages[0]], "hint": ["text", "*part", None, ""]})
    sides = side_by_side(tmp_path, lambda journal: playing(journal, rows, game(journal)), max_steps=2, **LONG)
    prompts_of_step = sides.stock.tables[0][1]["prompt"]
    assert len({str(prompt[-1]["content"]) for prompt in prompts_of_step}) == 2
    assert_alike(sides)


def test_environments_are_used_again_and_no_more_are_made_than_run_at_once(tmp_path):
    rows = conversations(4, environment=["game", "shop", "game", "game"])
    sides = side_by_side(tmp_path, lambda journal: playing(journal, rows, both_kinds(journal)), max_steps=2, **LONG)
    made = {name: len(sides.stock.journal.of(f"made {name}")) for name in ("Game", "Shop")}
    assert made == {"Game": ROWS, "Shop": GROUP}
    assert_alike(sides)


def test_a_reward_function_reads_the_environments_of_the_trainer(tmp_path):
    def parts(journal: Journal) -> dict[str, Any]:
        def reward(completions: Any, environments: Any, **columns: Any) -> list[float]:
            trainer = journal.trainer
            journal.write("environments", [one.number for one in trainer.environments], trainer._batch_environments)
            journal.write("the same", trainer.environments == environments)
            return [float(len(one)) for one in completions]

        rows = conversations(2, environment=["game", "shop"])
        return playing(journal, rows, both_kinds(journal), reward_funcs=reward)

    sides = side_by_side(tmp_path, parts, **LONG)
    assert sides.stock.journal.of("environments")[0][1] == GROUP * ["game"] + GROUP * ["shop"]
    assert_alike(sides)


def test_settings_of_the_template_reach_prompts_and_reward_models(tmp_path):
    def parts(journal: Journal) -> dict[str, Any]:
        tokenizer, scorer_tokenizer = chat_tokenizer(), chat_tokenizer(parses=False)
        config = tiny_model("llama").config
        config.num_labels, config.vocab_size = 1, len(scorer_tokenizer)
        transformers.set_seed(0)
        scorer = transformers.AutoModelForSequenceClassification.from_config(config)
        scorer.config._name_or_path = "scorer"
        scorer.register_forward_pre_hook(
            lambda model, args, inputs: journal.write("scored", inputs["input_ids"]), with_kwargs=True
        )
        return {
            "model": scripted_model(tokenizer),
            "processing_class": tokenizer,
            "train_dataset": conversations(2),
            "reward_funcs": [scorer, writing_reward(journal)],
            "reward_processing_classes": [scorer_tokenizer, None],
        }

    sides = side_by_side(tmp_path, parts, chat_template_kwargs={"style": "short"})
    assert all(text.startswith("(short)") for text in tokens_of(sides.stock.outputs[0][1], chat_tokenizer()))
    ((ids,),) = sides.stock.journal.of("scored")
    assert all(text.startswith("(short)") for text in chat_tokenizer().batch_decode(ids))
    assert_alike(sides)


@pytest.mark.parametrize(("chat", "steps"), [(False, 1), (True, 2)])
def test_columns_reach_reward_functions_and_rows_stay_as_they_are(tmp_path, chat, steps):
    def parts(journal: Journal) -> dict[str, Any]:
        tokenizer = chat_tokenizer(parses=False) if chat else tiny_tokenizer()
        return {
            "model": scripted_model(tokenizer),
            "processing_class": tokenizer,
            "train_dataset": conversations(4, number=[1, 2, 3, 4]) if chat else prompts(4),
            "reward_funcs": writing_reward(journal),
        }

    sides = side_by_side(tmp_path, parts, steps_per_generation=steps, max_steps=2)
    assert set(sides.stock.rows[0][1][0]) == {"prompt", "number" if chat else "answer"}
    assert ("old_per_token_logps" in sides.stock.outputs[0][1]) == (steps == 2)
    assert_alike(sides)


# ---- rollout_func ---------------------------------------------------------------------------------------------------


def rolling(journal: Journal, function: Any, chat: bool = False, **parts: Any) -> dict[str, Any]:
    tokenizer = chat_tokenizer(parses="tools" in parts) if chat else tiny_tokenizer()
    return {
        "model": scripted_model(tokenizer),
        "processing_class": tokenizer,
        "train_dataset": conversations(2) if chat else prompts(2),
        "reward_funcs": writing_reward(journal),
        "rollout_func": function,
        **parts,
    }


def written_rollout(journal: Journal, **more: Any) -> Any:
    """Two turns with an environment's words between them."""

    def rollout(asked: Any, trainer: Any) -> dict[str, Any]:
        journal.write("rollout_func", asked)
        tokenizer = trainer.processing_class
        chat = not isinstance(asked[0], str)
        texts = [one[-1]["content"] + MODEL if chat else one for one in asked]
        said = [tokenizer(letters(0, place, text))["input_ids"] for place, text in enumerate(texts)]
        told, last = tokenizer("told")["input_ids"], tokenizer("done" + EOS)["input_ids"]
        return {
            "prompt_ids": [tokenizer(text)["input_ids"] for text in texts],
            "completion_ids": [ids + told + last for ids in said],
            "logprobs": [[-0.5] * (len(ids) + len(told) + len(last)) for ids in said],
            "env_mask": [[1] * len(ids) + [0] * len(told) + [1] * len(last) for ids in said],
            **more,
        }

    return rollout


@pytest.mark.parametrize("chat", [False, True], ids=["text", "messages"])
def test_fields_of_a_rollout_func_become_columns_before_rewards_are_called(tmp_path, chat):
    fields = {"turns": list(range(ROWS)), "level": 7}
    sides = side_by_side(tmp_path, lambda journal: rolling(journal, written_rollout(journal, **fields), chat))
    ((_, _, _, columns),) = sides.stock.journal.of("reward")
    assert columns["turns"] == fields["turns"]
    assert columns["level"] == [7] * ROWS
    assert [row["turns"] for row in sides.stock.rows[0][1]] == fields["turns"]
    assert_alike(sides)


def test_a_rollout_funcs_mask_takes_tokens_from_the_loss_and_from_lengths(tmp_path):
    sides = side_by_side(tmp_path, lambda journal: rolling(journal, written_rollout(journal)), steps_per_generation=2)
    output = sides.stock.outputs[0][1]
    assert (output["completion_mask"] * (1 - output["tool_mask"])).sum() == 4 * ROWS
    assert "sampling_per_token_logps" in output
    assert_alike(sides)
