"""The images of this process's rows while TRL scores them, where tools or environments may show some.

Differs from images of a data set, which are read again by the number of the row: these are known here alone, so they
travel with their rows, packed. A row shows those of its prompt, then what came after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..forward.images import PromptProcessor, RowImages, packed_images, unpacked_images


def rows_of_packed(prepare: PromptProcessor, packed: Sequence[torch.Tensor]) -> RowImages:
    """Images that have travelled with their rows, one tensor of bytes for each."""
    return RowImages(range(len(packed)), lambda row: prepare.of(unpacked_images(packed[row])), prepare.types_of)


class ShownImages:
    """What rows show, as it becomes known.

    Args:
        prepare: makes of images what the model is given.
        images: of each row's prompt, from the data set.

    Attributes:
        packed: of each row, all that it shows so far, as bytes.
    """

    def __init__(self, prepare: PromptProcessor, images: Sequence[Sequence[Any]]) -> None:
        self.prepare = prepare
        self.of_prompts(images)

    @property
    def rows(self) -> RowImages:
        """The images, for a forward."""
        return rows_of_packed(self.prepare, self.packed)

    def of_prompts(self, images: Sequence[Sequence[Any] | None]) -> None:
        """Those of each row's prompt, as an environment may have changed it."""
        self._prompts = self.packed = [packed_images(some or ()) for some in images]

    def so_far(self, images: Sequence[Sequence[Any] | None], rows: Sequence[int]) -> None:
        """All that some rows show by now."""
        new = dict(zip(rows, images))
        self.packed = [packed_images(new[i] or ()) if i in new else old for i, old in enumerate(self.packed)]

    def without_completions(self, masked: Sequence[bool]) -> None:
        """A row whose completion is masked out shows what its prompt does."""
        self.packed = [p if out else now for out, p, now in zip(masked, self._prompts, self.packed)]
