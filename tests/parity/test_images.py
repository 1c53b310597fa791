"""Images of a data set, of tools and of environments: what models, rewards and tables get; as in stock TRL."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from tests.parity.harness import ROWS, assert_alike, side_by_side
from tests.parity.scripts import Journal, Script, writing_reward
from tests.support.images import Gallery, calling, image, image_model, image_processor, image_rows, look
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
    model.generate = Script(processor.tokenizer, says)
    return {
        "model": model,
        "processing_class": processor,
        "train_dataset": rows,
        "reward_funcs": writing_reward(journal),
        **parts,
    }


def in_messages() -> Dataset:
    """Conversations with their images inside the messages."""
    content = [[{"type": "image", "image": image(n)}, {"type": "text", "text": "what " + "ab"[n]}] for n in range(2)]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": parts}]} for parts in content])


@pytest.mark.parametrize("family", ["llava", "idefics3", "qwen2_5_vl", "gemma3", "internvl", "lfm2_vl"])
def test_images_of_the_data_set(tmp_path, family):
    rows = image_rows(2, shapes=((8, 8), (16, 8)))
    sides = side_by_side(tmp_path, lambda journal: showing(journal, family, rows), log_multimodal=True)
    assert "pixel_values" in sides.stock.outputs[0][1]
    assert len(sides.stock.tables[0][1]["images"]) == ROWS
    assert_alike(sides)
