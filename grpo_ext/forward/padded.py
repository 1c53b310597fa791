"""The padded forward: our own head on a padded batch, or TRL's method for what that cannot do.

Differs from TRL: `position_ids` are passed (absolute-position models are right under left padding), the batch is as
wide as its own longest row, and on our path only the scored positions go through the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .images import TOKEN_TYPES
from .lm_head import RouterOutput, Scores, Wanted, scored
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
    seen = rows.attention_mask(mask)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": seen, **images}
    if (positions := positions_of(policy, ids, mask, images)) is not None:
        inputs["position_ids"] = positions
    targets = torch.zeros_like(seen, dtype=torch.bool)
    targets[:, -width:] = seen[:, -width:].bool()
    predictor = targets.reshape(-1).nonzero().squeeze(1) - 1
    return scored(model, inputs, Wanted(predictor, rows.targets(), with_entropy, with_router), seen)


def score_through_trl(
    trl_scorer: Callable[..., Any],
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    with_router: bool = False,
    with_entropy: bool = True,
    multiple: int = 1,
    virtual_tokens: bool = False,
) -> Scores:
    """As `score_padded`, through TRL's own method.

    Args:
        trl_scorer: TRL's `_get_per_token_logps_and_entropies`, bound to the trainer.
        virtual_tokens: PEFT puts tokens of its own before each row and takes no `position_ids`: padding between them
            and the prompt would move it, so rows begin at their first token and all padding is on the right.
    """
    ids, mask, width = rows.padded(multiple)
    seen = rows.attention_mask(mask)
    images = rows.image_inputs(range(len(rows)), ids, ids.size(1) - width)
    found: list[RouterOutput] = []

    def forward(**inputs: Any) -> Any:
        inputs |= images
        positions = None if virtual_tokens else positions_of(policy, ids, mask, images)
        if positions is not None:
            inputs["position_ids"] = positions
        output = model(**inputs)
        if with_router:  # TRL keeps only the loss made of it
            found.append(RouterOutput(output.router_logits, output.router_counts))
        return output

    options = {"compute_entropy": with_entropy, "compute_aux_loss": with_router}
    kept = seen[:, -width:].bool()
    if virtual_tokens:
        columns = ids.size(1)
        start_B1 = mask.argmax(1, keepdim=True)
        turned_BL = (torch.arange(columns, device=ids.device) + start_B1) % columns
        images |= {name: images[name].gather(1, turned_BL) for name in TOKEN_TYPES if name in images}
        logps, entropies, *_ = trl_scorer(
            forward, ids.gather(1, turned_BL), seen.gather(1, turned_BL), columns - 1, **options
        )
        # token t of a row's scores is its column t + 1
        kept_BT = torch.arange(columns - 1 - width, columns - 1, device=ids.device) - start_B1
        logps, entropies = (None if values is None else values.gather(1, kept_BT) for values in (logps, entropies))
    else:
        logps, entropies, *_ = trl_scorer(forward, ids, seen, width, **options)
    assert logps is not None
    return Scores(logps[kept], None if entropies is None else entropies[kept], found[0] if found else None)
