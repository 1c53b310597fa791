"""The prefix form: prompts run once with a cache, and their completions, padded, run on it.

Differs from TRL, which repeats a prompt for each of its completions, and from a pack, which needs layers that attend
through transformers' interface: the cache holds the state of a linear-attention or convolution layer too. Both passes
run in one call of the model, because engines hook into that call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..batching.packing import group_runs
from .images import TOKEN_TYPES
from .lm_head import PREFIX, Scores, Wanted, scored
from .positions import positions_of
from .prefix_cache import Continuation, cached_under_checkpointing, unknown_layers, why_own_cache
from .rows import TokenRows


def why_no_prefix(policy: Any, reentrant: bool = False) -> str | None:
    """Why a model cannot run the prefix form, as a sentence; None if its class and configuration allow it.

    Args:
        reentrant: gradient checkpointing is reentrant, and passes no gradient through a cache.
    """
    if reentrant and policy.supports_gradient_checkpointing:
        return "gradient checkpointing with use_reentrant=True passes no gradient through a cache"
    if (reason := why_own_cache(policy)) is not None:
        return reason
    if unknown := unknown_layers(policy.config.get_text_config(decoder=True)):
        return f"{type(policy).__name__} has cache layers of another kind ({', '.join(unknown)})"
    return None


def score_prefix(
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    with_router: bool = False,
    with_entropy: bool = True,
    multiple: int = 1,
) -> Scores:
    """As `forward.packed.score_packed`, in the prefix form; prompts and completions are padded to `multiple`."""
    ids, mask, width = rows.padded(multiple)
    prompt, device = ids.size(1) - width, ids.device
    runs = [range(first, min(stop, len(rows))) for first, stop in group_runs(rows.same_prompt)]
    first_G = torch.tensor([run.start for run in runs], device=device)
    prompt_B = torch.repeat_interleave(torch.tensor([len(run) for run in runs], device=device))
    # a completion's last token predicts nothing, but a router's statistics count it. Some layers take one column alone
    # for a step of decoding, in which they change their cache
    columns = max(width if with_router else width - 1, 2)
    ids, mask = (torch.nn.functional.pad(values, (0, max(columns - width, 0))) for values in (ids, mask))
    attended = mask[:, : prompt + columns]
    places = rows.image_inputs(range(len(rows)), ids, prompt, pixels=False)
    position = positions_of(policy, ids, mask, places)
    inputs: dict[str, Any] = {"input_ids": ids[first_G, :prompt], "attention_mask": mask[first_G, :prompt]}
    images = rows.image_inputs([run.start for run in runs], inputs["input_ids"], prompt)
    inputs |= images
    if position is not None:
        inputs["position_ids"] = position[..., first_G, :prompt]
        position = position[..., prompt : prompt + columns]
    after = ids[:, prompt : prompt + columns]
    types = {name: torch.zeros_like(after) for name in TOKEN_TYPES if name in images}
    inputs[PREFIX] = Continuation(after, attended, position, prompt_B, dict.fromkeys(images) | types)
    # the last token of the prompt predicts the first of a completion; each other token is predicted by the one before
    before_BT = torch.arange(-1, width - 1, device=device) + torch.arange(len(rows), device=device)[:, None] * columns
    before_BT += len(runs) * prompt
    before_BT[:, 0] = prompt_B * prompt + prompt - 1
    targets = mask[:, prompt : prompt + width].bool()
    wanted = Wanted(before_BT[targets], rows.targets(), with_entropy, with_router)
    # a prompt counts once for each of its completions
    times_G1 = torch.bincount(prompt_B, minlength=len(runs))[:, None]
    counts = [inputs["attention_mask"] * times_G1, mask[:, prompt : prompt + columns]]
    with cached_under_checkpointing(policy):
        return scored(model, inputs, wanted, torch.cat([part.flatten() for part in counts])[None])
