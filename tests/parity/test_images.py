"""Images of a data set, of tools and of environments: what models, rewards and tables get; as in stock TRL."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from tests.parity.harness import ROWS, assert_alike, side_by_side
from tests.parity.scripts import Journal, Script, writing_reward
from tests.support.images import FAMILIES, Gallery, calling, image, image_model, image_processor, image_rows, look
from tests.support.tiny import stock_scores

pytestmark = stock_scores
LONG = {"max_completion_length": 60, "max_tool_calling_iterations": 2}


def says(turn: int, place: int, text: str) -> str:
    """Words with and without a vowel: those with one call `look` (`support.images.calling`)."""
    return ["so<eos>", "bcd<eos>", "e<eos>", "fgh"][(place + len(text)) % 4]


def showing(journal: Journal, family: str, rows: Dataset, **parts: Any) -> dict[str, Any]:
    """What a trainer is given for a model that takes images."""
    processor, model = image_processor(family), image_model(family)
    if {"tools", "environment_factory"} & parts.keys():
        calling(processor)
    script, hidden = Script(processor.tokenizer, says), {"generation_config"}
    if family == "llava":
        hidden.add("token_type_ids")  # TRL adds them after a tool's images, for any model; LLaVA takes none

    def generate(**inputs: Any) -> Any:
        journal.write("generate", {name: value for name, value in inputs.items() if name not in hidden})
        return script(**inputs)

    model.generate = generate
    return {
        "model": model,
        "processing_class": processor,
        "train_dataset": rows,
        "reward_funcs": writing_reward(journal),
        **parts,
    }


def in_messages() -> Dataset:
    """Conversations with their images inside the messages."""

    def messages(number: int) -> list[dict[str, Any]]:
        shown = [{"type": "image", "image": image(number + place)} for place in range(1 + number)]
        return [{"role": "user", "content": [*shown, {"type": "text", "text": f"what {number}"}]}]

    rows = Dataset.from_dict({"number": [0, 1]})
    return rows.with_transform(
        lambda batch: {**batch, "prompt": [messages(number) for number in batch["number"]]}, output_all_columns=True
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_a_data_set(tmp_path, family):
    rows = image_rows(2, shapes=((8, 8), (16, 8)))
    sides = side_by_side(tmp_path, lambda journal: showing(journal, family, rows), log_multimodal=True)
    assert "pixel_values" in sides.stock.outputs[0][1]
    assert len(sides.stock.tables[0][1]["images"]) == ROWS
    assert_alike(sides)


def test_images_in_messages(tmp_path):
    sides = side_by_side(tmp_path, lambda journal: showing(journal, "llava", in_messages()), log_multimodal=False)
    assert len(sides.stock.tables[0][1]["images"]) == 0
    assert_alike(sides)


def test_a_rollout_func_leaves_the_images_of_the_data_set_where_they_are(tmp_path):
    def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
        ids = trainer._tokenize_prompts(prompts)[0]
        rows = [[3 + (sum(row) + 7 * i + 3 * t) % 20 for t in range(3 + i % 4)] for i, row in enumerate(ids)]
        return {"prompt_ids": ids, "completion_ids": rows, "logprobs": None}

    sides = side_by_side(
        tmp_path,
        lambda journal: showing(journal, "llava", image_rows(2), rollout_func=rollout),
        log_multimodal=True,
    )
    assert len(sides.stock.tables[0][1]["images"]) == ROWS
    assert_alike(sides)


# of Gemma 3's and others', TRL hands over half
@pytest.mark.parametrize(("family", "steps"), [("llava", 1), ("qwen2_5_vl", 2)])
def test_images_of_tools_are_added_to_those_of_the_data_set(tmp_path, family, steps):
    def act(trainer: Any) -> None:
        trainer._image_pad_token_id = trainer.model.config.image_token_id  # TRL knows those of real models by name
        trainer.train()

    sides = side_by_side(
        tmp_path,
        lambda journal: showing(journal, family, image_rows(2), tools=[look]),
        act,
        log_multimodal=True,
        steps_per_generation=steps,
        **LONG,
    )
    assert {len(images) for images in sides.stock.tables[0][1]["images"]} >= {1, 2}
    assert_alike(sides)


def test_images_of_answers_that_do_not_fit_are_taken_back(tmp_path):
    sides = side_by_side(
        tmp_path,
        lambda journal: showing(journal, "llava", image_rows(2), tools=[look]),
        log_multimodal=True,
        max_tool_calling_iterations=3,
        max_completion_length=40,
    )
    messages = [message for completion in sides.stock.tables[0][1]["completion"] for message in completion]
    calls = sides.stock.metrics[0][1]["tools/call_frequency"][0] * ROWS
    assert calls > sum(message["role"] == "tool" for message in messages) > 0
    assert_alike(sides)


def test_images_of_environments(tmp_path):
    rows = image_rows(2).remove_columns("images")
    sides = side_by_side(
        tmp_path,
        lambda journal: showing(journal, "llava", rows, environment_factory=Gallery, reward_funcs=[]),
        log_multimodal=True,
        **LONG,
    )
    assert {len(images) for images in sides.stock.tables[0][1]["images"]} >= {1, 2}
    assert_alike(sides)
