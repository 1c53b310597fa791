"""Texts that a model counts as images: a placeholder that is written in a prompt or by a tool is refused with it."""

from typing import Any

import pytest
from datasets import Dataset, IterableDataset

from grpo_ext.errors import DataError
from tests.support import trainers
from tests.support.images import FAMILIES, calling, image, image_model, image_processor, image_rows, picture_reward
from tests.support.selection import few_of
from tests.support.tiny import tool


def make(folder: Any, family: str = "qwen2_5_vl", **changes: Any) -> Any:
    usual = {"reward": picture_reward, "train_dataset": image_rows(8), "max_steps": 1, "rollout_chunk_size": 8}
    usual["processing_class"] = image_processor(family)
    return trainers.make(folder, image_model(family), **{**usual, **changes})


def written(text: str, place: int = 5, images: int = 1) -> Dataset:
    """Rows with an image each, of which one has a text."""
    rows = [dict(row) for row in image_rows(8)]
    rows[place]["prompt"] = [{"role": "user", "content": f"what is {text} here"}]
    rows[place]["images"] = [image(3)] * images
    return Dataset.from_list(rows)


@pytest.mark.parametrize("images", few_of([0, 1], [1]))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_token_of_an_image_in_a_prompt_is_refused_before_training(tmp_path, family, images):
    """Of every family, in a row that no other check reads; with an image and without one."""
    token = "<soft>" if family == "gemma3" else "<image>"
    with pytest.raises(DataError, match=f"row 5 of the training data set: the prompt .*{token}.* would be counted as"):
        make(tmp_path, family, train_dataset=written(token, images=images))


def test_other_tokens_that_stand_for_something_are_refused_too(tmp_path):
    """Of a video; and an image's in a text as a prompt."""
    processor, model = image_processor("qwen2_5_vl"), image_model("qwen2_5_vl")
    model.config.video_token_id = processor.tokenizer.convert_tokens_to_ids("z")
    with pytest.raises(DataError, match="the text 'z'"):
        trainers.make(
            tmp_path / "config", model, picture_reward, processing_class=processor, train_dataset=written("z")
        )
    texts = Dataset.from_dict({"prompt": ["abc", "a <image> b"] * 4})
    with pytest.raises(DataError, match=r"row 1 .*'<image>'"):
        make(tmp_path / "texts", train_dataset=texts)


def test_a_stream_is_refused_where_the_prompt_is_sampled(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(written("<image>", place=1)))
    trainer = make(tmp_path, train_dataset=stream)
    with pytest.raises(DataError, match=r"the prompt .*here.* has the text '<image>'"):
        trainer.train()


@tool
def look(number: int) -> str:
    return "an <image> of it"


def test_a_tool_that_writes_it_is_named(tmp_path):
    processor = calling(image_processor("qwen2_5_vl"))
    settings = {"processing_class": processor, "tools": [look], "max_completion_length": 40}
    with pytest.raises(DataError, match="the answer of the tool 'look' has the text '<image>'"):
        make(tmp_path, **settings).train()


def test_a_text_that_only_looks_like_one_trains(tmp_path):
    make(tmp_path, train_dataset=written("< image >, <image or image>")).train()
