"""The packed forward: a prompt goes through the model once for all its completions, and nothing is padding.

Differs from TRL's `_get_per_token_logps_and_entropies`, which repeats prompts and pads. Only the positions that predict
a completion token go through the language-model head, on every device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..batching.packing import build_pack, group_runs
from .architecture import layer_kinds
from .attention import LAYOUT, PACKED, SUPPORTED, TakesNoPacks, packed_attention
from .lm_head import Scores, Wanted, scored
from .positions import accepts_positions
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


def score_packed(
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    with_router: bool = False,
    with_entropy: bool = True,
    multiple: int = 1,
) -> Scores:
    """Score completions through a pack.

    Args:
        model: the model as the loop calls it (wrapped by DDP, PEFT, ...).
        policy: the causal language model inside it, with the head of forward.lm_head.
        with_router: return the router logits of a MoE model.
        with_entropy: compute entropies.
        multiple: the pack is filled up to a multiple of this many tokens.

    Raises:
        TakesNoPacks: the model does not read the layout of the pack.
    """
    device, groups = rows.ids_N.device, group_runs(rows.same_prompt)
    pack = build_pack(rows.prompts_B, rows.completions_B, groups, with_router, multiple)
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
