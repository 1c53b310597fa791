"""The images of completions as arguments of a model, prepared image by image when a forward needs them.

Differs from TRL, which prepares the images of all rows of a process at once, once for each completion, and cuts the
result by rules for each model family. Used by the forwards and by sampling. Shapes: B rows, L columns.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..compat import IMAGE_ARGUMENTS, prepare_multimodal_messages
from ..errors import DataError, ModelError

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # one value per token
_TIFF_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F")  # that PIL writes and reads unchanged


Prepared = dict[str, torch.Tensor]  # by the names of the model's arguments; empty without images
_TOKENS = "image_tokens"  # not an argument: how many tokens stand for the images


def images_of(row: dict[str, Any]) -> list[Any]:
    if "images" in row:
        return [] if row["images"] is None else list(row["images"])
    return [] if row.get("image") is None else [row["image"]]


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a row, with its images in the content of its messages."""
    return prepare_multimodal_messages(row["prompt"], images=images_of(row))


def images_in(prompt: Any) -> list[Any]:
    """Images in order; none of a text, or of what a user's own code tokenises."""
    messages = [message for message in prompt if isinstance(message, dict)] if isinstance(prompt, list) else []
    contents = [message.get("content") for message in messages]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if isinstance(part, dict) and part.get("type") == "image"]


class PromptProcessor:
    def __init__(self, processor: Any, template: dict[str, Any], image_token: int | None) -> None:
        self.processor, self.template = processor, template
        self.image_token = -1 if image_token is None else image_token  # -1: no token

    def __call__(self, row: dict[str, Any]) -> Prepared:
        """Prepare the images of a row of the data set; a ModelError where a forward could not pass them on."""
        if isinstance(row["prompt"], str):
            return {}
        messages = messages_of(row)
        prepared = self.encoded(messages)
        tensors = {name: prepared[name] for name in IMAGE_ARGUMENTS if isinstance(prepared.get(name), torch.Tensor)}
        types = {name: tensors.pop(name) for name in TOKEN_TYPES if name in tensors}
        name = type(self.processor).__name__
        if images_in(messages) and not tensors:
            raise ModelError(
                f"{name} makes {', '.join(prepared)} of a prompt with images, and none of the arguments that TRL knows "
                f"({', '.join(IMAGE_ARGUMENTS)}); use a model whose processor does."
            )
        expected = self.types_of(prepared["input_ids"]) if types else {}
        if different := [kind for kind, values in types.items() if not torch.equal(values, expected[kind])]:
            raise ModelError(
                f"{name} returns {', '.join(different)} other than 1 for the image token ({self.image_token}) and 0 "
                "for all others, which is how tokens of completions are marked; use a model whose processor does."
            )
        tokens = (prepared["input_ids"] == self.image_token).sum()
        if images_in(messages) and self.image_token >= 0 and not tokens:
            raise DataError(
                f"{name} makes 0 image tokens ({self.image_token}) of a prompt with images: the chat template leaves "
                "them out; set a chat_template that shows them."
            )
        return {**tensors, _TOKENS: tokens}

    def encoded(self, messages: list[dict[str, Any]]) -> Any:
        """What the processor makes of a prompt."""
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        return self.processor.apply_chat_template(conversation=[messages], **options, **self.template)

    def of(self, images: Sequence[Any]) -> Prepared:
        if not images:
            return {}
        return self({"prompt": [{"role": "user", "content": ""}], "images": list(images)})

    @cached_property
    def _type_names(self) -> list[str]:
        prepared = self.processor(text=["."], return_tensors="pt")
        return [name for name in TOKEN_TYPES if name in prepared]

    def types_of(self, ids_BL: torch.Tensor) -> Prepared:
        """Types where the model takes them: 1 for an image's token, else 0."""
        return dict.fromkeys(self._type_names, (ids_BL == self.image_token).long())


@dataclass(frozen=True)
class RowImages:
    numbers_B: Sequence[int]  # rows with one number have the same images
    images_of: Callable[[int], Sequence[Any]]  # from a number to the images
    processor: PromptProcessor

    def of(self, rows: Sequence[int]) -> "RowImages":
        return RowImages([self.numbers_B[row] for row in rows], self.images_of, self.processor)

    @property
    def same(self) -> list[bool]:
        """Whether the images of each row but the first are those of the row before."""
        return [before == after for before, after in pairwise(self.numbers_B)]

    @cached_property
    def _prepared(self) -> dict[int, Prepared]:
        return {number: self.processor.of(self.images_of(number)) for number in dict.fromkeys(self.numbers_B)}

    def inputs(
        self, chosen: Sequence[int], ids_BL: torch.Tensor, pixels: bool = True, masked: bool = False
    ) -> Prepared:
        """The model's arguments for a batch of the `chosen` rows; without `pixels`, those that say where images are.

        `masked`: `ids_BL` may have completions that are masked out, whose tools showed further images.
        """
        rows = [self._prepared[self.numbers_B[row]] for row in chosen]
        left_out = {_TOKENS} if pixels else {_TOKENS, "pixel_values"}
        names = dict.fromkeys(name for row in rows for name in row if name not in left_out)
        for row, tokens in zip(rows, (ids_BL == self.processor.image_token).sum(1).tolist(), strict=True):
            if row and pixels and not masked and tokens != row[_TOKENS]:
                raise DataError(
                    f"{type(self.processor.processor).__name__} makes {row[_TOKENS]} image tokens of the images of a "
                    f"row, and its prompt and completion hold {tokens}: the chat template leaves out images in "
                    "messages of some role, for example of tools (set a chat_template that shows them), or the model "
                    "has sampled the token of an image (suppress it where vLLM samples)."
                )
        arguments = {name: joined([row[name] for row in rows if name in row]) for name in names}
        arguments |= self.processor.types_of(ids_BL)
        return {name: value.to(ids_BL.device) for name, value in arguments.items()}

    def as_trl(self, ids_BL: torch.Tensor) -> dict[str, Any]:
        """TRL's layout of a batch, for a user's `_get_per_token_logps_and_entropies`."""
        batch: dict[str, Any] = self.inputs(range(len(ids_BL)), ids_BL, masked=True)
        if "pixel_values" in batch:
            rows = [self._prepared[number] for number in self.numbers_B]
            batch["num_images"] = [len(self.images_of(number)) for number in self.numbers_B]
            tiles = [row["pixel_values"].size(0) if row else 0 for row in rows]
            tiled = batch["pixel_values"].dim() == 4 and tiles != batch["num_images"]
            if "spatial_shapes" in batch or tiled:
                batch["num_tiles"] = tiles
        return batch


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first dimension; the others are padded with zeros to the largest."""
    sizes = [max(part.size(d) for part in parts) for d in range(parts[0].dim())]
    filled = []
    for part in parts:
        missing = [sizes[d] - part.size(d) for d in range(part.dim() - 1, 0, -1)]
        filled.append(torch.nn.functional.pad(part, [n for more in missing for n in (0, more)]))
    return torch.cat(filled)


def packed_images(images: Sequence[Any]) -> bytes:
    """Images (PIL, paths, addresses, arrays of bytes) as one TIFF file, lossless; a DataError for any other."""
    if not images:
        return b""
    try:
        first, *others = map(_as_pil, images)
    except (AttributeError, TypeError, ValueError) as error:
        kinds = ", ".join(sorted({type(image).__name__ for image in images}))
        raise DataError(
            f"a prompt, a tool or an environment shows images as {kinds}, and one cannot be read ({error}); give PIL "
            "images, paths, addresses, or arrays of bytes, (height, width, 3) or (3, height, width)."
        ) from error
    file = io.BytesIO()
    first.save(file, "TIFF", save_all=True, append_images=others, compression="zstd")
    return file.getvalue()


def _as_pil(image: Any) -> Any:
    """An image of a mode that a TIFF file can hold; its pixels are those that a processor makes of it."""
    from PIL import Image  # not installed where only text is trained on
    from transformers.image_utils import load_image

    if isinstance(image, str):
        return load_image(image)
    if not isinstance(image, Image.Image):
        values = np.asarray(image)
        first = values.ndim == 3 and values.shape[0] in (1, 3)  # as transformers decides it
        image = Image.fromarray((values.transpose(1, 2, 0) if first else values).squeeze())
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")
    # a copied file of `datasets` cannot be saved as a frame, but its pixels can
    return image.copy() if image.mode in _TIFF_MODES else image.convert("RGB")


def unpacked_images(packed: bytes) -> list[Any]:
    if not packed:
        return []
    from PIL import Image, ImageSequence

    return [frame.copy() for frame in ImageSequence.Iterator(Image.open(io.BytesIO(packed)))]
