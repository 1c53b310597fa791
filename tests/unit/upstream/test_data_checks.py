"""Prompts that are missing, empty or too long are refused with their row."""

import pytest
from datasets import Dataset
from transformers import GPT2Config, LlamaConfig

from grpo_ext.errors import DataError
from grpo_ext.upstream.data_checks import check_prompt_lengths, check_prompts


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"prompt": []}, "the training data set is empty"),
        (
            {"question": ["a"], "answer": ["b"]},
            r"has no 'prompt' column; it has question, answer; .*rename_column\('question', 'prompt'\)",
        ),
        (
            {"prompt": ["a"], "completions": ["b"]},
            "has a column 'completions', a name under which reward functions get what was sampled",
        ),
        ({"prompt": [[{"role": "user", "content": "hi"}], []]}, r"row 1 .* has an empty prompt \(\[\]\)"),
    ],
)
def test_data_without_prompts_is_refused_with_the_row(data, says):
    with pytest.raises(DataError, match=says):
        check_prompts(Dataset.from_dict(data), "training")


@pytest.mark.parametrize(
    ("config", "room"),  # of learned positions the completion takes some
    [(GPT2Config(n_positions=64), 54), (LlamaConfig(max_position_embeddings=64), 64)],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_prompt_may_fill_the_room_and_not_one_token_more(config, room):
    def surveyed(*prompts):
        return check_prompts(Dataset.from_dict({"prompt": prompts}), "training")

    def lengths(prompts: list[str]) -> list[int]:  # a character is a token
        return [len(prompt) for prompt in prompts]

    check_prompt_lengths(surveyed("x" * room), lengths, config, max_completion_length=10)
    with pytest.raises(DataError, match=f"row 1 has {room + 1} tokens, .*room for {room} .*max_position_embeddings=64"):
        check_prompt_lengths(surveyed("a", "x" * (room + 1)), lengths, config, max_completion_length=10)
