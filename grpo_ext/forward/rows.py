"""Completions with their prompts, without padding: what every forward here starts from, and what it gives back.

Differs from TRL, whose batches are padded throughout: they are read and written at its methods alone (`of_padded`,
`to_columns`), and only the padded forward pads again. Shapes: B rows, N tokens, S completion tokens, T columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batching.sizes import ceil_div
from .images import RowImages


@dataclass(frozen=True)
class TokenRows:
    """Token ids of some completions, each after its prompt.

    Attributes:
        ids_N: of all rows, one after the other.
        prompts_B, completions_B: tokens of each; 0 for a completion that is masked out.
        same_prompt: for each row but the first, whether its prompt is that of the row before.
        images: of the prompts; None for a model that takes none.
    """

    ids_N: torch.Tensor
    prompts_B: Sequence[int]
    completions_B: Sequence[int]
    same_prompt: Sequence[bool]
    images: RowImages | None = None

    @classmethod
    def of_padded(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        completion_width: int,
        images: RowImages | None = None,
    ) -> TokenRows:
        """The rows of a batch (B, L) in TRL's layout: prompts padded on the left, completions on the right."""
        prompt_width = input_ids.size(1) - completion_width
        prompt_mask = attention_mask[:, :prompt_width]
        prompts = torch.stack([input_ids[:, :prompt_width].masked_fill(prompt_mask == 0, 0), prompt_mask])
        same = (prompts[:, 1:] == prompts[:, :-1]).all(dim=2).all(dim=0).tolist()
        if images is not None:
            same = [tokens and pixels for tokens, pixels in zip(same, images.same)]
        lengths = torch.stack([prompt_mask.sum(1), attention_mask[:, prompt_width:].sum(1)]).tolist()
        return cls(input_ids[attention_mask.bool()], lengths[0], lengths[1], same, images)

    def __len__(self) -> int:
        return len(self.prompts_B)

    @property
    def starts_B(self) -> list[int]:
        """Where each row begins among the tokens, and where the last one ends."""
        starts = [0]
        for prompt, completion in zip(self.prompts_B, self.completions_B):
            starts.append(starts[-1] + prompt + completion)
        return starts

    def part(self, rows: slice) -> TokenRows:
        """Consecutive rows."""
        first, last, starts = rows.start, min(rows.stop, len(self)), self.starts_B
        lengths = self.prompts_B[first:last], self.completions_B[first:last]
        images = None if self.images is None else self.images.of(range(first, last))
        same = self.same_prompt[first : last - 1]
        return TokenRows(self.ids_N[starts[first] : starts[last]], *lengths, same, images)

    def image_inputs(
        self, rows: Sequence[int], ids_BL: torch.Tensor, prompt_columns: int, pixels: bool = True
    ) -> dict[str, torch.Tensor]:
        """What a model that takes images is given beside the tokens of `rows`: see `RowImages.inputs`."""
        if self.images is None:
            return {}
        prompts = [self.prompts_B[row] for row in rows]
        return self.images.inputs(rows, ids_BL, prompts, prompt_columns, pixels)

    def targets(self) -> torch.Tensor:
        """The completion tokens, (S,)."""
        starts = self.starts_B
        pieces = [self.ids_N[start + prompt : stop] for start, stop, prompt in zip(starts, starts[1:], self.prompts_B)]
        return torch.cat(pieces)

    def padded(self, multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Ids and attention mask (B, L) in TRL's layout, and the completion columns T, at least one.

        Args:
            multiple: of which both widths are.
        """
        prompt = ceil_div(max(*self.prompts_B, 1), multiple) * multiple
        width = ceil_div(max(*self.completions_B, 1), multiple) * multiple
        device = self.ids_N.device
        column_L = torch.arange(-prompt, width, device=device)
        begins = torch.tensor([-n for n in self.prompts_B], device=device)[:, None]
        ends = torch.tensor(list(self.completions_B), device=device)[:, None]
        mask = (column_L >= begins) & (column_L < ends)
        ids = self.ids_N.new_zeros(mask.shape).masked_scatter(mask, self.ids_N)
        return ids, mask.long(), width

    def to_columns(self, values_S: torch.Tensor, width: int) -> torch.Tensor:
        """Values of the completion tokens as TRL takes them: (B, width), zero where there is no token.

        They stay connected to the model also where nothing is scored, so that every process can run its backward pass.
        """
        lengths = torch.tensor(list(self.completions_B), device=values_S.device)[:, None]
        mask = torch.arange(width, device=values_S.device) < lengths
        return values_S.new_zeros(mask.shape).masked_scatter(mask, values_S)
