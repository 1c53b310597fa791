"""Tiny models that take images, one for each rule of how images meet tokens, with their processors and data."""

import re
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import AutoConfig, AutoModelForImageTextToText, BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import make_flat_list_of_images
from transformers.processing_utils import ImagesKwargs

from tests.support.tiny import tiny_tokenizer, tool, with_calls

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
IMAGE = "<image>"
_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_key_value_heads": 2, "initializer_range": 0.2},
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, **_HEADS},
}
_GRID = ("image_rows", "image_cols", "image_sizes")  # of LFM2-VL's tiles


def _image_processor(name: str, **options: Any) -> Any:
    """The kind that needs no torchvision, by the name that transformers gives it."""
    kind = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return kind(**options)


def _tokenizer(**special: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, *special.values()]})
    for name, token in special.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class QwenProcessor(ProcessorMixin):
    """As Qwen2.5-VL's, whose class wants torchvision for videos: a token for each merged patch of an image."""

    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None, **kwargs: Any) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> BatchFeature:
        texts, found = [text] if isinstance(text, str) else list(text), {}
        if images is not None:
            found = dict(self.image_processor(images=make_flat_list_of_images(images), return_tensors="pt"))
            counts = iter((found["image_grid_thw"].prod(1) // 4).tolist())
            texts = [re.sub(IMAGE, lambda match: IMAGE * next(counts), row) for row in texts]
        options = {name: kwargs[name] for name in ("padding", "return_tensors") if name in kwargs}
        tokens = self.tokenizer(texts, **options)
        image = self.tokenizer.convert_tokens_to_ids(IMAGE)
        if "return_tensors" in options:
            types: Any = (tokens["input_ids"] == image).long()
        else:
            types = [[int(token == image) for token in row] for row in tokens["input_ids"]]
        return BatchFeature({**tokens, **found, "mm_token_type_ids": types})


class InternVLProcessor(transformers.InternVLProcessor):
    """Without the processor of videos, whose class wants torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class _Lfm2VlArguments(ImagesKwargs, total=False):
    return_row_col_info: bool


class Lfm2VlImages(BaseImageProcessor):
    """As LFM2-VL's, whose class wants torchvision: tiles, and beside several the whole image, made smaller."""

    model_input_names = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]
    valid_kwargs = _Lfm2VlArguments
    tile_size, encoder_patch_size, downsample_factor, use_thumbnail = 8, 2, 2, True

    def preprocess(
        self, images: Any, return_tensors: Any = None, return_row_col_info: bool = False, **kwargs: Any
    ) -> BatchFeature:
        size, patch = self.tile_size, self.encoder_patch_size
        found: dict[str, list[Any]] = {name: [] for name in (*self.model_input_names, *_GRID)}
        for picture in make_flat_list_of_images(images):
            pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1
            rows, columns = pixels.size(1) // size, pixels.size(2) // size
            tiles = [tile for row in pixels.split(size, 1) for tile in row.split(size, 2)]
            whole = pixels[:, :: max(rows, columns), :: max(rows, columns)]
            for tile in [*tiles, whole] if len(tiles) > 1 else tiles:
                patches = tile.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 3, 4, 0).flatten(2)
                missing = (size // patch) ** 2 - patches.shape[:2].numel()
                found["spatial_shapes"].append(patches.shape[:2])
                found["pixel_values"].append(torch.nn.functional.pad(patches.flatten(0, 1), (0, 0, 0, missing)))
                found["pixel_attention_mask"].append([1] * patches.shape[:2].numel() + [0] * missing)
            for name, value in zip(_GRID, (rows, columns, whole.shape[1:])):
                found[name].append(value)
        made: dict[str, Any] = {name: found[name] for name in _GRID} if return_row_col_info else {}
        made |= {name: torch.tensor(found[name]) for name in self.model_input_names[1:]}
        return BatchFeature({"pixel_values": torch.stack(found["pixel_values"]), **made}, tensor_type=return_tensors)


def image_processor(family: str) -> Any:
    """The processor of a family; images are 8 x 8 pixels, or what its tiles ask for."""
    if family == "llava":
        images = _image_processor("CLIPImageProcessor", size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        options = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return transformers.LlavaProcessor(images, _tokenizer(), chat_template=TEMPLATE, image_token=IMAGE, **options)
    if family == "idefics3":
        images = _image_processor(
            "Idefics3ImageProcessor", size={"longest_edge": 16}, max_image_size={"longest_edge": 8}
        )
        return transformers.Idefics3Processor(images, _tokenizer(), image_seq_len=4, chat_template=TEMPLATE)
    if family.startswith("qwen"):
        images = _image_processor(
            "Qwen2VLImageProcessor", patch_size=2, merge_size=2, temporal_patch_size=1, min_pixels=16, max_pixels=256
        )
        # between two images is a token, by which the model tells them apart
        return QwenProcessor(images, _tokenizer(), chat_template=TEMPLATE.replace(IMAGE, f"[{IMAGE}]"))
    if family == "gemma3":
        images = _image_processor("Gemma3ImageProcessor", size={"height": 8, "width": 8}, do_pan_and_scan=False)
        tokenizer = _tokenizer(boi_token="<begin>", eoi_token="<end>", image_token="<soft>")
        template = TEMPLATE.replace(IMAGE, "<begin>")
        return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    if family == "internvl":
        images = _image_processor("GotOcr2ImageProcessor", size={"height": 8, "width": 8}, max_patches=4)
        special = {"start_image_token": "<begin>", "end_image_token": "<end>", "video_token": "<video>"}
        tokenizer = _tokenizer(**special, context_image_token=IMAGE)
        return InternVLProcessor(images, tokenizer, image_seq_length=4, chat_template=TEMPLATE)
    if family == "lfm2_vl":
        special = {"image_start_token": "<begin>", "image_end_token": "<end>", "image_thumbnail_token": "<whole>"}
        tokenizer = _tokenizer(**special, image_token=IMAGE)
        tokenizer.add_tokens([f"<|img_row_1_col_{column}|>" for column in (1, 2)], special_tokens=True)
        return transformers.Lfm2VlProcessor(Lfm2VlImages(), tokenizer, chat_template=TEMPLATE)
    raise ValueError(family)


_VISION = {"hidden_size": 16, "intermediate_size": 16, "image_size": 8, "patch_size": 4, **_HEADS}
_TOWER = {
    **{"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    **{"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1},
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MODELS: dict[str, dict[str, Any]] = {
    "llava": {"vision_config": {**_VISION, "model_type": "clip_vision_model"}, "text_config": {"model_type": "llama"}},
    "idefics3": {
        "vision_config": {**_VISION, "patch_size": 2},
        "text_config": {"model_type": "llama"},
        **{"scale_factor": 2, "pad_token_id": 0},
    },
    "qwen2_5_vl": {
        "vision_config": {**_TOWER, "fullatt_block_indexes": [1], "window_size": 8},
        "text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
    },
    "qwen3_vl": {
        # what goes deep goes into the first layer's output
        "vision_config": {**_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "text_config": {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    },
    "gemma3": {
        "vision_config": {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        "text_config": {"head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 16},
        "mm_tokens_per_image": 4,
    },
    "internvl": {
        "vision_config": {**_VISION, "patch_size": 2},
        "text_config": {"model_type": "qwen2"},
        "image_seq_length": 4,
    },
    "lfm2_vl": {
        "vision_config": {**_VISION, "model_type": "siglip2_vision_model", "patch_size": 2, "num_patches": 16},
        "text_config": {
            **{"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "block_auto_adjust_ff_dim": False,
        },
        "projector_hidden_size": 32,
    },
}
FAMILIES = tuple(_MODELS)


def image_model(family: str, seed: int = 0) -> Any:
    """A random model of a family, of some ten thousand parameters."""
    tokenizer = image_processor(family).tokenizer
    token = tokenizer.convert_tokens_to_ids("<soft>" if family == "gemma3" else IMAGE)
    parts = dict(_MODELS[family])
    parts["text_config"] = {"vocab_size": len(tokenizer), **_TEXT, **parts["text_config"]}
    parts["image_token_index" if family in ("llava", "gemma3") else "image_token_id"] = token
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **parts))
        if family == "gemma3":  # begins at zero, where the norm after it has no derivative
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
        return model


def image(number: int, width: int = 8, height: int = 8) -> Any:
    """A picture that differs from the others in every patch."""
    values = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(number))
    from PIL import Image  # a machine that only has a GPU has no images

    return Image.fromarray(values.to(torch.uint8).numpy())


def image_rows(
    count: int = 8, per_prompt: tuple[int, ...] = (1,), shapes: tuple[tuple[int, int], ...] = ((8, 8),), first: int = 0
) -> Dataset:
    """Conversations with images before the question: `per_prompt` of `shapes` in turn, numbered from `first`."""
    rows = []
    for number in range(count):
        wanted = per_prompt[number % len(per_prompt)]
        pictures = [image(first + 10 * number + i, *shapes[(number + i) % len(shapes)]) for i in range(wanted)]
        question = "what " + "abcdefgh"[: 1 + number % 5]
        rows.append({"prompt": [{"role": "user", "content": question}], "images": pictures})
    return Dataset.from_list(rows)


def picture_reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    """Letters that are a vowel, less a little per character: varies within every group."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(sum(c in "aeiou" for c in text)) - 0.05 * len(text) for text in texts]


# ---- Tools and environments that show images ------------------------------------------------------------------------


def calling(processor: Any) -> Any:
    """The processor, for which a completion with a vowel calls the tool `look`."""

    def looks(ids: list[int]) -> list[tuple[str, int]]:
        text = processor.tokenizer.decode(ids, skip_special_tokens=True)
        return [("look", len(text))] if set(text) & set("aeiou") else []

    with_calls(processor.tokenizer, looks)
    return processor


class Gallery:
    """An environment that shows an image at the start, and one for each look."""

    first = 500

    def reset(self, **kwargs: Any) -> list[dict[str, Any]]:
        self.looks = 0
        return [{"type": "image", "image": image(self.first)}]

    @tool
    def look(self, number: int) -> list[dict[str, Any]]:
        self.looks = getattr(self, "looks", 0) + 1
        found = image(self.first + number, 8 + 8 * (number % 2))
        return [{"type": "image", "image": found}, {"type": "text", "text": "seen"}]

    def get_reward(self) -> float:
        return float(self.looks)


class OtherGallery(Gallery):
    """The same with other images."""

    first = 700


def looking_at(gallery: type[Gallery]) -> Any:
    """A tool that shows images of a gallery, or none."""

    @tool
    def look(number: int) -> list[dict[str, Any]]:
        return gallery().look(number) if number % 3 else []

    return look


look, look_elsewhere = looking_at(Gallery), looking_at(OtherGallery)
