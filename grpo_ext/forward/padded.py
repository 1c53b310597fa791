"""The padded forward: every completion with its prompt, in a batch padded as TRL pads.

Differs from TRL: `position_ids` are passed (absolute-position models are right under left padding), the batch is as
wide as its own longest row, and only the scored positions go through the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .lm_head import Scores, Wanted, scored
from .positions import positions_of
from .rows import TokenRows


def score_padded(
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    with_router: bool = False,
    with_entropy: bool = True,
    multiple: int = 1,
) -> Scores:
    """As `forward.packed.score_packed`, through a padded batch; prompts and completions are padded to `multiple`."""
    ids, mask, width = rows.padded(multiple)
    images = rows.image_inputs(range(len(rows)), ids, ids.size(1) - width)
    attended = rows.attention_mask(mask)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": attended, **images}
    if (positions := positions_of(policy, ids, mask, images)) is not None:
        inputs["position_ids"] = positions
    targets = torch.zeros_like(attended, dtype=torch.bool)
    targets[:, -width:] = attended[:, -width:].bool()
    predictor = targets.reshape(-1).nonzero().squeeze(1) - 1
    return scored(model, inputs, Wanted(predictor, rows.targets(), with_entropy, with_router), attended)
