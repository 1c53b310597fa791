"""Where the images of rows come from: read again from the data set, or packed with the completions.

Packed images travel with their rows, because tools, environments or a user's override may show some that no data set
holds. Used by the engine and by every forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..forward.images import PromptProcessor, RowImages, packed_images, unpacked_images
from .batch import ROW_IMAGES, ROW_NUMBER
from .transcript import Transcript


@dataclass
class ImageSource:
    """See the module.

    Attributes:
        prepare: makes of a row what a model that takes images is given; None for other models.
        travelling: images travel with their rows.
        prompts: the data set of the loader made last, by whether it is for training.
    """

    prepare: PromptProcessor | None = None
    travelling: bool = False
    prompts: dict[bool, Any] = field(default_factory=dict)

    def of_transcripts(self, transcripts: Sequence[Transcript]) -> RowImages | None:
        """The images of transcripts, as far as they have come; None for a model that takes none."""
        if (prepare := self.prepare) is None:
            return None
        if self.travelling:
            return self._of_packed(prepare, [packed_images(transcript.images) for transcript in transcripts])
        rows = {transcript.number: transcript.row for transcript in transcripts}
        return RowImages([t.number for t in transcripts], lambda number: prepare(rows[number]))  # type: ignore[misc]

    def of_batch(self, fields: Mapping[str, Any], training: bool) -> RowImages | None:
        """The images of completions, from the columns of a rollout batch or of TRL's dictionary."""
        if (prepare := self.prepare) is None:
            return None
        if (packed := fields.get(ROW_IMAGES)) is not None:
            return self._of_packed(prepare, list(packed))
        if (numbers := fields.get(ROW_NUMBER)) is None:  # a batch of the user's own
            return None
        prompts = self.prompts[training]
        return RowImages(torch.as_tensor(numbers).flatten().tolist(), lambda number: prepare(prompts[number]))

    @staticmethod
    def _of_packed(prepare: PromptProcessor, packed: Sequence[torch.Tensor]) -> RowImages:
        return RowImages(range(len(packed)), lambda row: prepare.of(unpacked_images(packed[row])), prepare.types_of)
