"""The images of rows as arguments of a model, prepared row by row when a forward needs them.

Images of the data set are read again by the row's number; images from tools or environments are part of the row, as
bytes. Differs from TRL, which prepares the images of all rows of a process at once, once for each completion, and cuts
the result by rules for each model family. Used by the forwards and by sampling. Shapes: B rows, L columns.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..compat import IMAGE_ARGUMENTS, prepare_multimodal_messages
from ..errors import DataError, ModelError

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # one value per token of a prompt


@dataclass(frozen=True)
class Prepared:
    """The output of a processor for one row, without the token ids."""

    tensors: dict[str, torch.Tensor]  # of images, by the names of the model's arguments; empty without images
    types: dict[str, torch.Tensor]  # of the prompt's tokens, 1-D, by name; empty for most models
    images: int  # their number


def images_of(row: dict[str, Any]) -> list[Any]:
    """The images of a row of the data set, from the columns that TRL reads."""
    if "images" in row:
        return list(row["images"] or [])
    return [] if row.get("image") is None else [row["image"]]


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a row, with its images in the content of its messages."""
    return prepare_multimodal_messages(row["prompt"], images=images_of(row))


def images_in(prompt: Any) -> list[Any]:
    """The images in the content of messages, in order; none of a text, or of what a user's own code tokenises."""
    messages = [message for message in prompt if isinstance(message, dict)] if isinstance(prompt, list) else []
    contents = [message.get("content") for message in messages]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if isinstance(part, dict) and part.get("type") == "image"]


class PromptProcessor:
    """Prepares the rows of a model that takes images.

    Args:
        template: the chat template and its arguments, as TRL passes them.
        image_token: id of the token that stands for an image or a part of it; None if there is none.
    """

    def __init__(self, processor: Any, template: dict[str, Any], image_token: int | None) -> None:
        self.processor, self.template, self.image_token = processor, template, image_token

    def __call__(self, row: dict[str, Any]) -> Prepared:
        """Prepare the prompt of a row of the data set."""
        count = 0
        if isinstance(row["prompt"], str):
            prepared = self.processor(text=[row["prompt"]], return_tensors="pt")
        else:
            messages = messages_of(row)
            count = len(images_in(messages))
            prepared = self.processor.apply_chat_template(
                conversation=[messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                **self.template,
            )
        known = {name: prepared[name] for name in IMAGE_ARGUMENTS if isinstance(prepared.get(name), torch.Tensor)}
        types = {name: known.pop(name)[0] for name in TOKEN_TYPES if name in known}
        if count and not known:
            raise ModelError(
                f"{type(self.processor).__name__} makes {', '.join(prepared)} of a prompt with images, and none of the "
                f"arguments that TRL knows ({', '.join(IMAGE_ARGUMENTS)}); use a model whose processor does."
            )
        return Prepared(known, types, count)

    def of(self, images: Sequence[Any]) -> Prepared:
        """Prepare images without a prompt."""
        if not images:
            return Prepared({}, {}, 0)
        prepared = self({"prompt": [{"role": "user", "content": ""}], "images": list(images)})
        return Prepared(prepared.tensors, {}, len(images))

    @cached_property
    def _type_names(self) -> list[str]:
        prepared = self.processor(text=["."], return_tensors="pt")
        return [name for name in TOKEN_TYPES if name in prepared]

    def types_of(self, ids_BL: torch.Tensor) -> dict[str, torch.Tensor]:
        """The types of all tokens of a batch, where the model takes them: 1 for an image's token, else 0."""
        token = -1 if self.image_token is None else self.image_token
        return dict.fromkeys(self._type_names, (ids_BL == token).long())


@dataclass(frozen=True)
class RowImages:
    """The images of some rows."""

    # of each row in the data set; rows of one number have one prompt. Where images are part of the rows, all differ
    numbers_B: Sequence[int]
    prepare: Callable[[int], Prepared]  # prepares the row of a number
    # from ids (B, L) to the types of the tokens; None where `prepare` returns them
    types_of: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None

    def of(self, rows: Sequence[int]) -> RowImages:
        """The images of some of the rows."""
        return RowImages([self.numbers_B[row] for row in rows], self.prepare, self.types_of)

    @property
    def same(self) -> list[bool]:
        """For each row but the first, whether its images are those of the row before."""
        return [before == after for before, after in zip(self.numbers_B, self.numbers_B[1:])]

    @cached_property
    def _prepared(self) -> dict[int, Prepared]:
        return {number: self.prepare(number) for number in dict.fromkeys(self.numbers_B)}

    def inputs(
        self,
        chosen: Sequence[int],
        ids_BL: torch.Tensor,
        prompts_B: Sequence[int],
        prompt_columns: int,
        pixels: bool = True,
    ) -> dict[str, torch.Tensor]:
        """The model's arguments for a batch whose prompts end at the same column.

        Args:
            chosen: the rows of the batch, among these.
            prompts_B: tokens of the prompts; later turns of a conversation may be among them.
            prompt_columns: columns up to the end of the prompts.
            pixels: include the pixels, and not only the arguments that say where images are.
        """
        rows = [self._prepared[self.numbers_B[row]] for row in chosen]
        names = dict.fromkeys(name for row in rows for name in row.tensors if pixels or name != "pixel_values")
        arguments = {name: joined([row.tensors[name] for row in rows if name in row.tensors]) for name in names}
        for name in dict.fromkeys(name for row in rows for name in row.types):
            arguments[name] = torch.zeros(ids_BL.shape, dtype=torch.long)
            for values, tokens, row in zip(arguments[name], prompts_B, rows):
                if len(row.types[name]) != tokens:
                    raise DataError(
                        f"a prompt has {tokens} tokens, and its row of the data set {len(row.types[name])}, by which "
                        "the images are placed; a rollout_func or a subclass that changes prompts of a model that "
                        "takes images has to change the data set instead."
                    )
                values[prompt_columns - tokens : prompt_columns] = row.types[name]
        if self.types_of is not None:
            arguments |= self.types_of(ids_BL)
        return {name: value.to(ids_BL.device) for name, value in arguments.items()}

    def as_trl(self, ids_BL: torch.Tensor, prompts_B: Sequence[int], prompt_columns: int) -> dict[str, Any]:
        """The images in TRL's layout of a batch, for a user's `_get_per_token_logps_and_entropies`."""
        batch: dict[str, Any] = self.inputs(range(len(ids_BL)), ids_BL, prompts_B, prompt_columns)
        if "pixel_values" in batch:
            rows = [self._prepared[number] for number in self.numbers_B]
            batch["num_images"] = [row.images for row in rows]
            tiles = [row.tensors["pixel_values"].size(0) if row.images else 0 for row in rows]
            tiled = batch["pixel_values"].dim() == 4 and tiles != batch["num_images"]
            if "spatial_shapes" in batch or tiled:
                batch["num_tiles"] = tiles
        return batch


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along their first dimension; the other dimensions are padded with zeros to the largest."""
    sizes = [max(part.size(d) for part in parts) for d in range(parts[0].dim())]
    filled = []
    for part in parts:
        missing = [sizes[d] - part.size(d) for d in range(part.dim() - 1, 0, -1)]
        filled.append(torch.nn.functional.pad(part, [n for more in missing for n in (0, more)]))
    return torch.cat(filled)


def packed_images(images: Sequence[Any]) -> torch.Tensor:
    """Images (PIL, paths, addresses, byte arrays (height, width, 3)) as lossless RGB, uint8 (N,); N = 0 for none.

    Raises:
        DataError: something else.
    """
    if not images:
        return torch.empty(0, dtype=torch.uint8)
    from PIL import Image  # not installed where only text is trained on
    from transformers.image_utils import load_image

    try:
        first, *others = (load_image(i if isinstance(i, (str, Image.Image)) else Image.fromarray(i)) for i in images)
    except (AttributeError, TypeError, ValueError) as error:
        kinds = ", ".join(sorted({type(image).__name__ for image in images}))
        raise DataError(
            f"a tool or environment shows images as {kinds}, and one cannot be read ({error}); give PIL images, paths, "
            "addresses, or arrays (height, width, 3) of bytes."
        ) from error
    file = io.BytesIO()
    first.save(file, "TIFF", save_all=True, append_images=others, compression="tiff_adobe_deflate")
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked_images(packed: torch.Tensor) -> list[Any]:
    """The inverse of `packed_images`: PIL images; trailing zeros are ignored."""
    if not packed.any():
        return []
    from PIL import Image, ImageSequence

    file = io.BytesIO(packed.cpu().numpy().tobytes())
    return [frame.copy() for frame in ImageSequence.Iterator(Image.open(file))]
