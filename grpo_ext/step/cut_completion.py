"""A completion whose rows run in several micro-batches, its pieces.

Its loss may depend on all of its tokens together: on the ratio of the sequence, on a mask, on what a registered loss
reads. So the scores of all pieces are computed first, without gradients, and with them the loss of the whole and its
slope by each score. A piece adds slopes times its own scores: values and gradients of the pieces add up to those of
the whole. Shapes: S tokens of the completion, or of a piece.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

# log-probabilities and entropies, (S,) in nats; None: nothing depends on them
Scores = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass
class CutCompletion:
    scores: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # by the first row of the piece
    slopes: dict[int, Scores] = field(default_factory=dict)
    loss: torch.Tensor | None = None  # of the whole

    def derive(self, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Set the loss and its slopes, by a function of the scores of the whole."""
        pieces = sorted(self.scores)
        sizes = [len(self.scores[piece][0]) for piece in pieces]
        with torch.enable_grad():
            columns = zip(*(self.scores[piece] for piece in pieces), strict=True)
            whole = [torch.cat(parts).requires_grad_() for parts in columns]
            loss = loss_of(*whole)
            slopes = torch.autograd.grad(loss, whole, allow_unused=True) if loss.requires_grad else [None, None]
        parts = [[None] * len(pieces) if slope is None else slope.split(sizes) for slope in slopes]
        self.loss, self.slopes = loss.detach(), dict(zip(pieces, zip(*parts, strict=True), strict=True))

    def share(self, piece: int, scores: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """What a piece adds to the loss of the step; the first one has the value."""
        pairs = zip(self.slopes[piece], scores, strict=True)
        terms = [(slope_S * (score_S - score_S.detach())).sum() for slope_S, score_S in pairs if slope_S is not None]
        assert self.loss is not None
        first = self.loss if piece == min(self.scores) else torch.zeros_like(self.loss)
        return first + sum(terms, start=scores[0][:0].sum())  # zero, and connected to the graph
