"""The three forms of a forward: packed, prefix and padded.

Differs from TRL, whose forward repeats a prompt for each of its completions and pads. In a pack a prompt runs once and
its completions after it, without padding. In the prefix form prompts run once with a cache and their completions,
padded, run on it: for layers that cannot run a pack, as the cache holds the state of linear attention and convolutions
too. The padded form is TRL's batch, as wide as its own longest row, with `position_ids`, so that absolute positions are
right under left padding. In every form only positions that predict a completion token go through the head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..batching.micro_batches import Form
from ..batching.packing import Pack, build_pack, group_runs
from .architecture import layer_kinds
from .attention import LAYOUT, PACKED, SUPPORTED, TakesNoPacks, packed_attention
from .images import TOKEN_TYPES
from .lm_head import PREFIX, Scores, Wanted, scored
from .positions import accepts_positions, positions_of
from .prefix_cache import Continuation, cached_under_checkpointing, unknown_layers, why_own_cache
from .rows import TokenRows

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def why_not_packed(policy: Any) -> str | None:
    """Why a model cannot run packs, as a sentence; None if its class and configuration allow it."""
    config = policy.config.get_text_config()
    name = getattr(config, "_attn_implementation", None)
    if name == PACKED:
        name = config.grpo_ext_attention
    layers = set(layer_kinds(config))
    if not getattr(policy, "_supports_attention_backend", False):
        return f"{type(policy).__name__} does not use transformers' attention interface"
    if name not in SUPPORTED:
        return f"attn_implementation={name!r} takes no packs (these do: {', '.join(SUPPORTED)})"
    if getattr(policy, "_is_stateful", False) or not layers <= _KNOWN_LAYERS:
        kinds = ", ".join(sorted(layers - _KNOWN_LAYERS)) or "recurrent"
        return f"{type(policy).__name__} has layers of another kind ({kinds})"
    backbone = policy.base_model
    if not accepts_positions(backbone):
        return f"{type(policy).__name__} takes no position_ids"
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(backbone).forward).parameters.values()):
        return f"{type(policy).__name__} passes no further arguments to its layers"
    return None


def pack_of(rows: TokenRows, with_router: bool = False, multiple: int = 1) -> Pack:
    """The layout of a pack of these rows; arguments as of `score_packed`."""
    return build_pack(rows.prompts_B, rows.completions_B, group_runs(rows.same_prompt), with_router, multiple)


def score_packed(
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    with_router: bool = False,
    with_entropy: bool = True,
    multiple: int = 1,
    pack: Pack | None = None,
) -> Scores:
    """Score completions through a pack.

    Args:
        model: the model as the loop calls it (wrapped by DDP, PEFT, ...).
        policy: the causal language model inside it, with the head of forward.lm_head.
        with_router: return the router logits of a MoE model.
        with_entropy: compute entropies.
        multiple: the pack is filled up to a multiple of this many tokens.
        pack: the layout, which notes the layers that read it; None: that of `pack_of`.

    Raises:
        TakesNoPacks: the model does not read the layout of the pack.
    """
    device, pack = rows.ids_N.device, pack or pack_of(rows, with_router, multiple)
    ids = rows.ids_N[torch.tensor(pack.source_N, device=device)].unsqueeze(0)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.tensor(pack.positions_N, device=device).unsqueeze(0),
        LAYOUT: pack.layout,
    }
    predictor = torch.tensor(pack.predictor_S, dtype=torch.long, device=device)
    wanted = Wanted(predictor, rows.targets(), with_entropy, with_router)
    with packed_attention(policy):
        scores = scored(model, inputs, wanted, torch.tensor(pack.layout.counts_N, device=device).unsqueeze(0))
    if not pack.layout.readers:
        raise TakesNoPacks(f"{type(policy).__name__} does not attend through transformers' attention interface")
    return scores


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


def columns_of(longest: int, with_router: bool = False) -> int:
    """Columns of the completions' pass, where the longest has so many tokens.

    A completion's last token predicts nothing, but a router's statistics count it. Some layers take one column alone
    for a step of decoding, in which they change their cache.
    """
    return max(longest if with_router else longest - 1, 2)


def score_prefix(
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    with_router: bool = False,
    with_entropy: bool = True,
    multiple: int = 1,
) -> Scores:
    """As `score_packed`, in the prefix form; the widths of prompts and completions are multiples of `multiple`."""
    ids, mask, width = rows.padded(multiple)
    prompt, device = ids.size(1) - width, ids.device
    runs = [range(first, min(stop, len(rows))) for first, stop in group_runs(rows.same_prompt)]
    first_G = torch.tensor([run.start for run in runs], device=device)
    prompt_B = torch.repeat_interleave(torch.tensor([len(run) for run in runs], device=device))
    columns = columns_of(width, with_router)
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
    with cached_under_checkpointing(policy):  # one call of the model for both passes, because engines hook into it
        return scored(model, inputs, wanted, torch.cat([part.flatten() for part in counts])[None])


def score_padded(
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    with_router: bool = False,
    with_entropy: bool = True,
    multiple: int = 1,
) -> Scores:
    """As `score_packed`, in a padded batch; the widths of prompts and completions are multiples of `multiple`."""
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


FORWARDS: dict[Form, Callable[..., Scores]] = {"packed": score_packed, "prefix": score_prefix, "padded": score_padded}
