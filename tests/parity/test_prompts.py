"""From rows to prompts: environments, observations, templates, columns; as in stock TRL."""

from typing import Any

import pytest
import transformers
from datasets import Dataset

from tests.parity.harness import GROUP, ROWS, alike
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
    parts_of,
    shop,
    tokens_of,
    writing_reward,
)
from tests.support.selection import few_of
from tests.support.tiny import prompts, stock_scores, tiny_model

pytestmark = stock_scores
PLAYS = by_turn([f"a{EOS}", call("guess", number=3) + EOS, call("buy", thing="x") + EOS], [f"ok{EOS}", "so"])
LONG = {"max_completion_length": 200}


def playing(journal: Journal, dataset: Dataset, environments: Any, **parts: Any) -> dict[str, Any]:
    changes = {"train_dataset": dataset, "environment_factory": environments, **parts}
    return parts_of(journal, PLAYS, chat_tokenizer(), **changes)


def both_kinds(journal: Journal) -> dict[str, type]:
    return {"game": game(journal), "shop": shop(journal)}


def test_rows_without_a_prompt_get_it_from_their_environment_and_reset_sees_no_placeholder(tmp_path):
    rows = Dataset.from_dict({"environment": ["game", "shop"], "hint": ["go", "stay"]})
    stock = alike(tmp_path, lambda journal: playing(journal, rows, both_kinds(journal)), **LONG)
    assert {frozenset(row) for _, _, row in stock.journal.of("reset")} == {frozenset({"hint"})}


def test_reset_gets_the_column_environment_where_there_is_one_factory(tmp_path):
    rows = conversations(2, environment=["game", "shop"], level=[1, 2])
    stock = alike(tmp_path, lambda journal: playing(journal, rows, game(journal)), **LONG)
    columns = {"prompt", "level", "environment"}
    assert {frozenset(row) for _, _, row in stock.journal.of("reset")} == {frozenset(columns)}


def test_environments_of_two_kinds_show_their_tools_and_may_give_the_rewards_at_once_and_later(tmp_path):
    rows = conversations(2, environment=["game", "shop"], level=[1, 2])
    stock = alike(tmp_path, lambda journal: playing(journal, rows, both_kinds(journal), reward_funcs=[]), **LONG)
    assert {frozenset(row) for _, _, row in stock.journal.of("reset")} == {frozenset({"prompt", "level"})}
    texts = tokens_of(stock.outputs[0][1], chat_tokenizer())
    assert {text.split("u:")[0] for text in texts[:GROUP]} == {"[guess]"}
    assert {text.split("u:")[0] for text in texts[GROUP:]} == {"[buy]"}
    assert len(stock.journal.of("get_reward")) == len(stock.journal.of("async get_reward")) == GROUP
    assert stock.metrics[0][1]["rewards/Shop/mean"][0] > 0


@pytest.mark.parametrize("parts", few_of([False, True], [True]), ids=["text", "parts"])
def test_an_observation_becomes_part_of_the_last_message(tmp_path, parts):
    contents = [[{"type": "text", "text": text}] if parts else text for text in "abc"]
    messages = [[{"role": "system", "content": contents[2]}, {"role": "user", "content": one}] for one in contents]
    rows = Dataset.from_dict({"prompt": [*messages, messages[0]], "hint": ["text", "*part", None, ""]})
    stock = alike(tmp_path, lambda journal: playing(journal, rows, game(journal)), max_steps=2, **LONG)
    prompts_of_step = stock.tables[0][1]["prompt"]
    assert len({str(prompt[-1]["content"]) for prompt in prompts_of_step}) == 2


@pytest.mark.full
def test_environments_are_used_again_and_no_more_are_made_than_run_at_once(tmp_path):
    rows = conversations(4, environment=["game", "shop", "game", "game"])
    stock = alike(tmp_path, lambda journal: playing(journal, rows, both_kinds(journal)), max_steps=2, **LONG)
    made = {name: len(stock.journal.of(f"made {name}")) for name in ("Game", "Shop")}
    assert made == {"Game": ROWS, "Shop": GROUP}


def test_a_reward_function_reads_the_environments_of_the_trainer(tmp_path):
    def parts(journal: Journal) -> dict[str, Any]:
        def reward(completions: Any, environments: Any, **columns: Any) -> list[float]:
            trainer = journal.trainer
            journal.write("environments", [one.number for one in trainer.environments], trainer._batch_environments)
            journal.write("the same", trainer.environments == environments)
            return [float(len(one)) for one in completions]

        rows = conversations(2, environment=["game", "shop"])
        return playing(journal, rows, both_kinds(journal), reward_funcs=reward)

    stock = alike(tmp_path, parts, **LONG)
    assert stock.journal.of("environments")[0][1] == GROUP * ["game"] + GROUP * ["shop"]


def test_settings_of_the_template_reach_prompts_and_reward_models(tmp_path):
    def parts(journal: Journal) -> dict[str, Any]:
        scorer_tokenizer = chat_tokenizer(parses=False)
        config = tiny_model("llama").config
        config.num_labels, config.vocab_size = 1, len(scorer_tokenizer)
        transformers.set_seed(0)
        scorer = transformers.AutoModelForSequenceClassification.from_config(config)
        scorer.config._name_or_path = "scorer"
        scorer.register_forward_pre_hook(
            lambda model, args, inputs: journal.write("scored", inputs["input_ids"]), with_kwargs=True
        )
        rewards = {"reward_funcs": [scorer, writing_reward(journal)]}
        rewards["reward_processing_classes"] = [scorer_tokenizer, None]
        return parts_of(journal, letters, chat_tokenizer(), **rewards)

    stock = alike(tmp_path, parts, chat_template_kwargs={"style": "short"})
    assert all(text.startswith("(short)") for text in tokens_of(stock.outputs[0][1], chat_tokenizer()))
    ((ids,),) = stock.journal.of("scored")
    assert all(text.startswith("(short)") for text in chat_tokenizer().batch_decode(ids))


@pytest.mark.parametrize(("chat", "steps"), [(False, 1), (True, 2)])
def test_columns_reach_reward_functions_and_rows_stay_as_they_are(tmp_path, chat, steps):
    def parts(journal: Journal) -> dict[str, Any]:
        if chat:
            rows = conversations(4, number=[1, 2, 3, 4])
            return parts_of(journal, letters, chat_tokenizer(parses=False), train_dataset=rows)
        return parts_of(journal, train_dataset=prompts(4))

    stock = alike(tmp_path, parts, steps_per_generation=steps, max_steps=2)
    assert set(stock.rows[0][1][0]) == {"prompt", "number" if chat else "answer"}
    assert ("old_per_token_logps" in stock.outputs[0][1]) == (steps == 2)


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


def test_fields_of_a_rollout_func_become_columns_before_rewards_are_called(tmp_path):
    fields = {"turns": list(range(ROWS)), "level": 7}

    def parts(journal: Journal) -> dict[str, Any]:
        return parts_of(journal, letters, chat_tokenizer(parses=False), rollout_func=written_rollout(journal, **fields))

    stock = alike(tmp_path, parts)
    ((_, _, _, columns),) = stock.journal.of("reward")
    assert columns["turns"] == fields["turns"]
    assert columns["level"] == [7] * ROWS
    assert [row["turns"] for row in stock.rows[0][1]] == fields["turns"]


def test_a_rollout_funcs_mask_takes_tokens_from_the_loss_and_from_lengths(tmp_path):
    stock = alike(
        tmp_path, lambda journal: parts_of(journal, rollout_func=written_rollout(journal)), steps_per_generation=2
    )
    output = stock.outputs[0][1]
    assert (output["completion_mask"] * (1 - output["tool_mask"])).sum() == 4 * ROWS
    assert "sampling_per_token_logps" in output
