"""The images of completions: those of transcripts while sampling, and their column of the rollout batch afterwards.

A completion holds all images that it shows, whether the data set, a tool, an environment or a user's override has them,
as the bytes of a file. Completions of one prompt share these bytes. Used by the engine and by every forward.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..batching.prompt_order import StepRows
from ..errors import DataError
from ..forward.columns import ROW_IMAGES
from ..forward.images import PromptProcessor, RowImages, images_in, messages_of, packed_images, unpacked_images
from ..runtime.collectives import any_process
from ..sampling.turn import Context
from .transcript import Transcript


@dataclass
class ImageSource:
    prepare: PromptProcessor | None = None  # makes the model's arguments from images; None: the model takes none

    def of_transcripts(self, transcripts: Sequence[Context]) -> RowImages | None:
        if self.prepare is None:
            return None
        return RowImages(first_alike(transcripts), lambda number: transcripts[number].images, self.prepare)

    def packed(self, transcripts: Sequence[Transcript]) -> list[bytes] | None:
        """The column that `of_batch` reads, if any."""
        if self.prepare is None:
            return None
        numbers = first_alike(transcripts)
        packed = {number: packed_images(transcripts[number].images) for number in dict.fromkeys(numbers)}
        return [packed[number] for number in numbers]

    def of_batch(self, fields: Mapping[str, Any]) -> RowImages | None:
        packed = fields.get(ROW_IMAGES)
        if self.prepare is None or packed is None:  # the latter in a batch of the user's own
            return None
        return RowImages(_first_places(packed), lambda number: unpacked_images(packed[number]), self.prepare)

    def refuse_mixed(self, rows: StepRows) -> None:
        if self.prepare is None:
            return
        prompts = dict(zip(rows.numbers, rows.rows)).values()
        shown = [isinstance(row["prompt"], list) and images_in(messages_of(row)) for row in prompts]
        if any_process(any(shown)) and any_process(not all(shown)):
            raise DataError(
                "prompts with and without images are in one rollout batch of a model whose weights the processes share "
                "(FSDP, DeepSpeed), where every process has to run the image tower in every forward or none; give each "
                "prompt an image, or train with DDP."
            )


def first_alike(transcripts: Sequence[Context]) -> list[int]:
    """For each transcript the place of the first one with the same prompt and images, by their numbers."""
    return _first_places([(t.number, place if t.number is None else None) for place, t in enumerate(transcripts)])


def _first_places(values: Sequence[Hashable]) -> list[int]:
    places: dict[Hashable, int] = {}
    return [places.setdefault(value, place) for place, value in enumerate(values)]
