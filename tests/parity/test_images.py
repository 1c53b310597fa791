"""Images of a data set, of tools and of environments: what models, rewards and tables get; as in stock TRL."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from datasets import Dataset

from tests.parity.harness import ROWS, alike, train
from tests.parity.scripts import Journal, Script, writing_reward
from tests.support.images import FAMILIES, Gallery, calling, image, image_model, image_processor, image_rows, look
from tests.support.selection import few_of
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


def of_two_shapes() -> Dataset:
    return image_rows(2, shapes=((8, 8), (16, 8)))


def without_images() -> Dataset:
    return image_rows(2).remove_columns("images")


def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
    """A `rollout_func`: the images of the data set stay where they are."""
    ids = trainer._tokenize_prompts(prompts)[0]
    rows = [[3 + (sum(row) + 7 * i + 3 * t) % 20 for t in range(3 + i % 4)] for i, row in enumerate(ids)]
    return {"prompt_ids": ids, "completion_ids": rows, "logprobs": None}


def knowing_images(trainer: Any) -> None:
    """Train where TRL knows the token of images, as it does by name for real models."""
    trainer._image_pad_token_id = trainer.model.config.image_token_id
    trainer.train()


# family, rows, arguments of the trainer, settings, and numbers of images that rows of the table have
CASES: dict[str, tuple[str, Callable[[], Dataset], dict[str, Any], dict[str, Any], set[int]]] = {
    **{f"data set, {family}": (family, of_two_shapes, {}, {}, {1}) for family in FAMILIES},
    "messages": ("llava", in_messages, {}, {"log_multimodal": False}, set()),
    "rollout_func": ("llava", partial(image_rows, 2), {"rollout_func": rollout}, {}, {1}),
    "environments": ("llava", without_images, {"environment_factory": Gallery, "reward_funcs": None}, LONG, {1, 2}),
    # of the images of Gemma 3's and others' tools, TRL hands over half
    "tools": ("llava", partial(image_rows, 2), {"tools": [look]}, LONG, {1, 2}),
    "tools, two steps": (
        *("qwen2_5_vl", partial(image_rows, 2), {"tools": [look]}),
        *({"steps_per_generation": 2, **LONG}, {1, 2}),
    ),
}


@pytest.mark.parametrize("name", few_of(CASES, ("environments",)))
def test_images_are_those_of_stock_trl(tmp_path, name):
    family, rows, parts, settings, counts = CASES[name]
    act = knowing_images if "tools" in parts else train
    parts = partial(showing, family=family, rows=rows(), **parts)
    stock = alike(tmp_path, parts, act, **{"log_multimodal": True, **settings})
    assert "pixel_values" in stock.outputs[0][1]
    assert {1, 2} & {len(images) for images in stock.tables[0][1]["images"]} == counts


@pytest.mark.full
def test_images_of_answers_that_do_not_fit_are_taken_back(tmp_path):
    parts = partial(showing, family="llava", rows=image_rows(2), tools=[look])
    stock = alike(tmp_path, parts, log_multimodal=True, max_tool_calling_iterations=3, max_completion_length=40)
    messages = [message for completion in stock.tables[0][1]["completion"] for message in completion]
    calls = stock.metrics[0][1]["tools/call_frequency"][0] * ROWS
    assert calls > sum(message["role"] == "tool" for message in messages) > 0
