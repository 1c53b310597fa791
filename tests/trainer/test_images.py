"""Models that take images: their update is that of one process and one micro-batch, and what stock TRL learns."""

import io
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from PIL import Image

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError, DataError, ModelError
from grpo_ext.forward.images import packed_images, unpacked_images
from grpo_ext.run.state import load_state
from grpo_ext.view import TrainerView
from tests.support import trainers
from tests.support.decoding import decoding
from tests.support.images import (
    FAMILIES,
    TEMPLATE,
    Gallery,
    OtherGallery,
    calling,
    image,
    image_model,
    image_processor,
    image_rows,
    look,
    look_elsewhere,
    picture_reward,
)
from tests.support.rollouts import share_forwards
from tests.support.selection import few_of
from tests.support.tiny import stock_scores, tool
from tests.support.trainers import SAVE, change, error, form_of, log_of, parameters, train_and_keep_first
from tests.tolerances import DIFFERENT, UPDATE

MIXED = {"per_prompt": (1, 0, 2), "shapes": ((8, 8), (16, 8))}  # prompts without an image and with several


def make(folder: Any, family: str = "llava", **changes: Any) -> Any:
    usual = {"reward": picture_reward, "train_dataset": image_rows(8, **MIXED), "max_steps": 2, "rollout_chunk_size": 8}
    if "processing_class" not in changes:
        usual["processing_class"] = image_processor(family)
    return trainers.make(folder, image_model(family), **{**usual, **changes})


@pytest.mark.parametrize("family", few_of(FAMILIES, ("qwen2_5_vl",)))
def test_the_update_depends_on_neither_micro_batch_size_nor_form(tmp_path, family):
    whole = make(tmp_path / "whole", family, per_device_train_batch_size=16, max_steps=1)
    part = "deepstack" if family == "qwen3_vl" else "vis"  # vision, visual
    tower = [p for name, p in whole.model.named_parameters() if part in name]
    before = [p.detach().clone() for p in tower]
    expected = change(whole)
    assert form_of(whole) == "prefix"
    assert any(not torch.equal(p, old) for p, old in zip(tower, before)), "the image tower has to learn"
    for size, changes in ((3, {"forward": "padded"}), (1, {"gradient_checkpointing": True})):
        name = f"{size}-{'-'.join(changes)}"
        found = change(make(tmp_path / name, family, per_device_train_batch_size=size, max_steps=1, **changes))
        assert error(expected, found) <= UPDATE, name
    others = image_rows(8, **MIXED, first=100)
    assert error(expected, change(make(tmp_path / "others", family, train_dataset=others, max_steps=1))) > DIFFERENT


@pytest.mark.full
def test_compact_decoding_samples_what_generate_samples(tmp_path):
    """Also where prompts have the same tokens and other images."""
    rows = image_rows(8)
    rows = rows.map(lambda row: {"prompt": rows[0]["prompt"]})
    sampled = []
    for compact in (True, False):
        settings = {"train_dataset": rows, "max_steps": 1}
        with decoding(compact):
            sampled.append(train_and_keep_first(make(tmp_path / f"{compact}", "lfm2_vl", **settings))["completion_ids"])
    one, other = sampled
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def resumed(trainer: Any) -> torch.Tensor:
    """The update of a run that goes on from its first checkpoint."""
    start = parameters(trainer)
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-1")
    return parameters(trainer) - start


def test_evaluation_reads_the_images_of_its_own_rows(tmp_path):
    def evaluated(name: str, first: int, size: int) -> float:
        sizes = {"per_device_eval_batch_size": size, "num_generations_eval": 2}
        trainer = make(tmp_path / name, eval_dataset=image_rows(3, first=first), **sizes)
        return trainer.evaluate()["eval_entropy"]

    one = evaluated("one", 50, 6)
    assert evaluated("two", 50, 1) == pytest.approx(one, rel=1e-5)
    assert evaluated("three", 90, 6) != pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("per_prompt", few_of([(1, 2), (0,), (1, 0)], [(1, 2), (1, 0)]))
def test_where_weights_are_shared_either_every_prompt_has_an_image_or_none(tmp_path, per_prompt):
    trainer = make(tmp_path, train_dataset=image_rows(8, per_prompt), max_steps=1)
    share_forwards(trainer)
    if per_prompt != (1, 0):
        trainer.train()
        return
    with pytest.raises(DataError, match="prompts with and without images are in one rollout batch"):
        trainer.train()


# the first checkpoint is within a rollout batch
EXACT = {"bitwise_invariant": True, **SAVE, "global_batch_size": 8, "rollout_batch_size": 16}
SHOWN = {"max_completion_length": 60, "max_tool_calling_iterations": 2}


def with_tools(folder: Any, family: str = "llava", tool: Any = look, **settings: Any) -> Any:
    parts: dict[str, Any] = {"tools": [tool]}
    if isinstance(tool, type):
        parts = {"environment_factory": tool, "train_dataset": image_rows(8).remove_columns("images")}
    return make(folder, family, processing_class=calling(image_processor(family)), **{**parts, **SHOWN, **settings})


@pytest.mark.parametrize(
    ("family", "tool", "other", "masks"),
    [
        ("qwen2_5_vl", look, look_elsewhere, False),
        ("llava", Gallery, OtherGallery, False),
        # a completion that is masked out shows nothing
        ("llava", look, look_elsewhere, True),
        ("internvl", look, look_elsewhere, False),
    ],
)
@pytest.mark.full
def test_images_that_are_shown_later_train_alike_for_every_micro_batch_size(tmp_path, family, tool, other, masks):
    settings = {"mask_truncated_completions": masks, "num_iterations": 1 + masks}
    settings["max_steps"] = 1 if tool is Gallery else 2  # which shows one before the first token
    whole = with_tools(tmp_path / "whole", family, tool, per_device_train_batch_size=16, **settings)
    expected = change(whole)
    assert log_of(whole, "tools/call_frequency")[0] > 0
    if masks:
        assert 0 < log_of(whole, "completions/clipped_ratio")[0] < 1
    else:
        assert form_of(whole) == "padded"
    parts = {"per_device_train_batch_size": 5, "gradient_checkpointing": True, **settings}
    assert error(expected, change(with_tools(tmp_path / "parts", family, tool, **parts))) <= UPDATE
    assert error(expected, change(with_tools(tmp_path / "other", family, other, **settings))) > DIFFERENT


@pytest.mark.full
def test_with_shown_images_a_resumed_run_has_the_same_bits_in_other_micro_batches(tmp_path):
    whole = change(with_tools(tmp_path / "whole", per_device_train_batch_size=8, **EXACT))
    assert torch.equal(whole, resumed(with_tools(tmp_path / "whole", per_device_train_batch_size=3, **EXACT)))


def test_shown_images_under_an_engine_that_shares_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainerView, "sharded", True)
    with pytest.raises(ConfigError, match="tools may show an image to only one; train with DDP"):
        with_tools(tmp_path)


def hiding(role: str, family: str) -> Any:
    """A processor whose chat template leaves out the images of a role."""
    processor = calling(image_processor(family))
    processor.chat_template = TEMPLATE.replace("<image>", f"{{% if m['role'] != {role!r} %}}<image>{{% endif %}}")
    assert processor.chat_template != TEMPLATE
    return processor


@tool
def words(number: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "seen"}]


words.__name__ = "look"  # the tool that is called


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("qwen2_5_vl", r"QwenProcessor makes \d+ image tokens .* hold \d+: .* in messages of some role"),
        ("llava", "the chat template does not accept .*'role': 'tool'.* Found total 0 <image> tokens and 1 images"),
    ],
    ids=["qwen2_5_vl", "llava"],
)
@pytest.mark.full
def test_a_template_that_leaves_out_images_of_answers_is_refused_when_a_tool_shows_one(tmp_path, family, says):
    settings = {"processing_class": hiding("tool", family), "max_steps": 1, **SHOWN}
    with pytest.raises(DataError, match=says):
        make(tmp_path / "images", family, tools=[look], **settings).train()
    trainer = make(tmp_path / "texts", family, tools=[words], **settings)
    trainer.train()
    assert log_of(trainer, "tools/call_frequency")[0] > 0


def test_a_template_that_leaves_out_images_of_prompts_is_refused_before_training(tmp_path):
    with pytest.raises(DataError, match=r"QwenProcessor makes 0 image tokens .* of a prompt with images"):
        make(tmp_path, "qwen2_5_vl", processing_class=hiding("user", "qwen2_5_vl"))


def test_a_template_that_leaves_out_images_of_some_messages_of_a_prompt_is_refused(tmp_path):
    shown = [
        {"role": role, "content": [{"type": "image", "image": image(n)}]} for n, role in enumerate(("system", "user"))
    ]
    rows = Dataset.from_dict({"n": range(8)}).with_transform(lambda batch: {"prompt": [shown for _ in batch["n"]]})
    trainer = make(tmp_path, "qwen2_5_vl", processing_class=hiding("system", "qwen2_5_vl"), train_dataset=rows)
    with pytest.raises(DataError, match=r"QwenProcessor makes 8 image tokens .* hold 4: "):
        trainer.train()


def drawn_anew() -> Dataset:
    rows, drawn = image_rows(8), iter(range(1000, 2000))
    rows.set_transform(lambda batch: {**batch, "images": [[image(next(drawn))] for _ in batch["prompt"]]})
    return rows


def beside_text() -> Dataset:
    return image_rows(3).map(lambda row: {"prompt": row["prompt"][0]["content"]})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (lambda: {"train_dataset": drawn_anew()}, "gives other images when it is read again"),
        (lambda: {"train_dataset": beside_text()}, "row 0 of the data set has images and a prompt that is text"),
        (lambda: {"processing_class": image_processor("llava").tokenizer}, "the processing class is a tokenizer"),
        (
            lambda: {"rollout_func": print, "tools": [look], "processing_class": calling(image_processor("llava"))},
            "TRL leaves out the images of prompts there",
        ),
    ],
    ids=["drawn", "text", "tokenizer", "rollout_func and tools"],
)
def test_images_that_cannot_be_placed_are_refused(tmp_path, parts, words):
    with pytest.raises((ConfigError, DataError), match=words):
        make(tmp_path, **parts()).train()


@pytest.mark.full
def test_a_stream_of_images_trains_like_a_data_set_with_a_length(tmp_path):
    rows = image_rows(8, **MIXED)
    whole = change(make(tmp_path / "whole", train_dataset=rows, shuffle_dataset=False))
    stream = {"train_dataset": rows.to_iterable_dataset(), "shuffle_dataset": False, "per_device_train_batch_size": 3}
    assert error(whole, change(make(tmp_path / "stream", **stream))) <= UPDATE


@pytest.mark.full
def test_a_checkpoint_holds_the_images_of_a_prompt_once_and_a_resumed_run_has_the_same_bits(tmp_path):
    whole = change(make(tmp_path / "whole", **EXACT))
    state = load_state(tmp_path / "whole" / "checkpoint-1")
    assert state is not None
    images = state["rollouts"]["batch"]["columns"]["row_images"]["files"]
    assert len(images["lengths"]) < len(images["rows"]) == EXACT["rollout_batch_size"]
    assert torch.equal(whole, resumed(make(tmp_path / "whole", per_device_train_batch_size=3, **EXACT)))


def test_a_processor_that_marks_tokens_in_its_own_way_is_refused(tmp_path):
    processor = image_processor("qwen2_5_vl")
    call = type(processor).__call__

    class Marking(type(processor)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = call(self, *args, **kwargs)
            if isinstance(types := output["mm_token_type_ids"], torch.Tensor):
                output["mm_token_type_ids"] = 2 * types
            return output

    processor.__class__ = Marking
    with pytest.raises(ModelError, match="returns mm_token_type_ids other than 1 for the image token"):
        make(tmp_path, "qwen2_5_vl", processing_class=processor)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "HSV"])
def test_packed_images_keep_the_pixels_of_every_mode(mode):
    pictures = [image(1, 16, 8), image(2).convert("L").convert("I") if mode == "I;16" else image(2)]
    pictures[1] = pictures[1].convert(mode)
    for picture, back in zip(pictures, unpacked_images(packed_images(pictures)), strict=True):
        expected = picture.convert("RGB") if picture.mode == "HSV" else picture
        assert (back.mode, back.size, back.tobytes()) == (expected.mode, expected.size, expected.tobytes())


def test_packed_images_are_not_turned_and_arrays_have_their_channels_last_or_first():
    file, picture = io.BytesIO(), image(3, 16, 8)
    exif = picture.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    picture.save(file, "PNG", exif=exif)
    values = np.asarray(picture)
    kinds = [Image.open(file), values, torch.tensor(values.transpose(2, 0, 1))]
    assert all(np.array_equal(values, back) for back in unpacked_images(packed_images(kinds)))
    assert not np.array_equal(values, unpacked_images(packed_images([image(4, 16, 8)]))[0])
    with pytest.raises(DataError, match="shows images as Tensor, and one cannot be read"):
        packed_images([torch.zeros(3, 8, 8)])


@pytest.mark.full
def test_without_images_a_model_that_takes_some_runs_packs_with_its_tokenizer(tmp_path):
    rows = image_rows(8).remove_columns("images")
    made = {"train_dataset": rows, "processing_class": image_processor("llava").tokenizer, "max_steps": 1}
    whole = make(tmp_path / "whole", per_device_train_batch_size=16, **made)
    expected = change(whole)
    assert form_of(whole) == "packed"
    assert error(expected, change(make(tmp_path / "parts", per_device_train_batch_size=3, **made))) <= UPDATE


@stock_scores
@pytest.mark.parametrize("family", few_of(["llava", "internvl"], ["internvl"]))
def test_a_users_loss_finds_the_images_where_trl_has_them(tmp_path, family):
    class Own(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            counts = inputs["num_images" if family == "llava" else "num_tiles"]
            assert inputs["pixel_values"].size(0) == sum(counts)
            assert (counts == inputs["num_images"]) == (family == "llava")
            return trl.GRPOTrainer._compute_loss(self, model, inputs)

    rows = image_rows(8, shapes=((8, 8), (16, 8)))
    settings = {"train_dataset": rows, "per_device_train_batch_size": 16, "max_steps": 1}
    whole = change(make(tmp_path / "whole", family, **settings))
    assert error(whole, change(make(tmp_path / "own", family, cls=Own, **settings))) <= UPDATE
