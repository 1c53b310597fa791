"""Where the images of rows come from: read again from the data set, or packed with the completions.

Images are packed where tools, environments or a user's override may show some that no data set holds. Used by the
engine and by every forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batching.prompt_order import StepRows
from ..errors import DataError
from ..forward.images import PromptProcessor, RowImages, images_in, messages_of, packed_images, unpacked_images
from ..runtime.collectives import any_process
from .batch import ROW_IMAGES, ROW_NUMBER, Column
from .ragged import Ragged
from .transcript import Transcript


@dataclass
class ImageSource:
    """Where the images of a run's completions come from."""

    prepare: PromptProcessor | None = None  # makes the model's arguments from a row; None: it takes no images
    carry_images: bool = False  # every completion carries all images of its row, as a column
    prompts: dict[bool, Any] = field(default_factory=dict)  # latest data set, by training or not

    def of_transcripts(self, transcripts: Sequence[Transcript]) -> RowImages | None:
        """The images that transcripts show so far; None for a model that takes none."""
        if (prepare := self.prepare) is None:
            return None
        if self.carry_images:
            return self._of_packed(prepare, [packed_images(transcript.images) for transcript in transcripts])
        rows = {transcript.number: transcript.row for transcript in transcripts}
        return RowImages([t.number for t in transcripts], lambda number: prepare(rows[number]))  # type: ignore[misc]

    def columns_of(self, transcripts: Sequence[Transcript], masked: Sequence[bool]) -> dict[str, Column]:
        """The column that `of_batch` reads, if any; `masked` completions keep the images of their prompts only."""
        if self.prepare is None:
            return {}
        if not self.carry_images:
            return {ROW_NUMBER: torch.tensor([transcript.number for transcript in transcripts])}
        shown = [t.prompt_alone() if out else t for t, out in zip(transcripts, masked, strict=True)]
        return {ROW_IMAGES: Ragged.of([packed_images(transcript.images) for transcript in shown])}

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

    def refuse_mixed(self, rows: StepRows) -> None:
        """Raise a DataError, on every process, for prompts with and without images in one batch; a collective."""
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

    @staticmethod
    def _of_packed(prepare: PromptProcessor, packed: Sequence[torch.Tensor]) -> RowImages:
        return RowImages(range(len(packed)), lambda row: prepare.of(unpacked_images(packed[row])), prepare.types_of)
