"""The packed forward: log-probabilities of a padded batch, computed without its padding and its repeated prompts.

Differs from TRL's `_get_per_token_logps_and_entropies`: a prompt goes through the model once for all its completions,
and only the positions that predict a completion token go through the language-model head, on every device. One place
serves the policy, the old and the reference log-probabilities. Shapes: B completions, T completion tokens, N tokens of
the pack, S scored positions, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..batching.packing import build_pack, group_runs
from ..batching.sizes import ceil_div
from .attention import LAYOUT, PACKED, SUPPORTED, TakesNoPacks, packed_attention
from .lm_head import SCORE, RouterOutput, Wanted
from .positions import accepts_positions, position_ids

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}

# log-probabilities (B, T), entropies (B, T) or None, router's output or None
Scores = tuple[torch.Tensor, torch.Tensor | None, RouterOutput | None]


def why_not_packed(policy: Any) -> str | None:
    """Why a model cannot run packs, as a sentence; None if it can as far as its configuration tells."""
    config = policy.config.get_text_config()
    name = getattr(config, "_attn_implementation", None)
    if name == PACKED:
        name = config.grpo_ext_attention
    layers = set(getattr(config, "layer_types", None) or ())
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


def read_batch(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_width: int
) -> tuple[list[int], list[int], list[bool]]:
    """Of a padded batch (B, L): prompt lengths, completion lengths, which rows have the prompt of the row before."""
    prompt_width = input_ids.size(1) - completion_width
    prompt_mask = attention_mask[:, :prompt_width]
    prompts = torch.stack([input_ids[:, :prompt_width].masked_fill(prompt_mask == 0, 0), prompt_mask])
    same = (prompts[:, 1:] == prompts[:, :-1]).all(dim=2).all(dim=0)
    lengths = torch.stack([prompt_mask.sum(1), attention_mask[:, prompt_width:].sum(1)]).tolist()
    return lengths[0], lengths[1], same.tolist()


def trim(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, multiple: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Cut columns that are padding in every row: prompts on the left, completions on the right.

    Returns:
        The trimmed ids and mask, and the completion width, at least 1.
    """
    prompt_width = input_ids.size(1) - logits_to_keep
    used = attention_mask.bool().any(0)
    prompt_used, completion_used = used[:prompt_width].nonzero(), used[prompt_width:].nonzero()
    prompt = prompt_width - int(prompt_used[0]) if len(prompt_used) else 1
    width = int(completion_used[-1]) + 1 if len(completion_used) else 1
    if multiple is not None:
        prompt = min(ceil_div(prompt, multiple) * multiple, prompt_width)
        width = min(ceil_div(width, multiple) * multiple, logits_to_keep)
    columns = slice(prompt_width - prompt, prompt_width + width)
    return input_ids[:, columns], attention_mask[:, columns], width


def _score(
    model: Callable[..., Any],
    inputs: dict[str, Any],
    predictor_S: torch.Tensor,
    batch: tuple[torch.Tensor, torch.Tensor, int],
    with_entropy: bool,
    router_counts_BL: torch.Tensor | None,
) -> Scores:
    """Run `model`; the log-probabilities come from the hidden states at `predictor_S` of the flattened inputs."""
    input_ids, attention_mask, completion_width = batch
    mask_BT = attention_mask[:, -completion_width:].bool()
    targets_S = input_ids[:, -completion_width:][mask_BT]
    wanted = Wanted(predictor_S, targets_S, with_entropy, router_counts_BL is not None)
    output = model(**inputs, **{SCORE: wanted})

    def rows(values_S: torch.Tensor) -> torch.Tensor:
        # connected to the model also where nothing is scored, so that every process can run its backward pass
        return values_S.new_zeros(mask_BT.shape).masked_scatter(mask_BT.to(values_S.device), values_S)

    router = None if router_counts_BL is None else RouterOutput(output.router_logits, router_counts_BL)
    return rows(output.log_probs), rows(output.entropy) if with_entropy else None, router


def score_packed(
    model: Callable[..., Any],
    policy: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    with_router: bool = False,
    with_entropy: bool = True,
    multiple: int = 1,
) -> Scores:
    """Score the completions of a padded batch through a pack.

    Args:
        model: the model as the loop calls it (wrapped by DDP, PEFT, ...).
        policy: the causal language model inside it, with the head of engine.lm_head.
        input_ids, attention_mask: (B, L) in TRL's layout, prompts padded on the left, completions on the right.
        completion_width: columns of the completions, T.
        with_router: whether to ask a MoE model for its router's output.
        with_entropy: whether to compute entropies.
        multiple: the pack is filled up to a multiple of this many tokens.

    Returns:
        Log-probabilities and entropies (B, T), zero where there is no token, and the router's output; None for what
        was not asked for.

    Raises:
        TakesNoPacks: the model does not read the layout of the pack.
    """
    prompts, completions, same = read_batch(input_ids, attention_mask, completion_width)
    width, device = input_ids.size(1), input_ids.device
    prompt_width = width - completion_width
    pack = build_pack(prompts, completions, group_runs(same), prompt_width, width, with_router, multiple)
    ids = input_ids.reshape(-1)[torch.tensor(pack.source_N, device=device)].unsqueeze(0)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.tensor(pack.positions_N, device=device).unsqueeze(0),
        LAYOUT: pack.layout,
    }
    counts = torch.tensor(pack.layout.counts_N, device=device).unsqueeze(0) if with_router else None
    predictor = torch.tensor(pack.predictor_S, dtype=torch.long, device=device)
    with packed_attention(policy):
        batch = (input_ids, attention_mask, completion_width)
        result = _score(model, inputs, predictor, batch, with_entropy, counts)
    if not pack.layout.readers:
        raise TakesNoPacks(f"{type(policy).__name__} does not attend through transformers' attention interface")
    return result


def score_padded(
    model: Callable[..., Any],
    policy: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    with_router: bool = False,
    with_entropy: bool = True,
) -> Scores:
    """As `score_packed`, through the padded batch itself; only the scored positions go through the head."""
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    if accepts_positions(policy):
        inputs["position_ids"] = position_ids(attention_mask)
    scored = torch.zeros_like(attention_mask, dtype=torch.bool)
    scored[:, -completion_width:] = attention_mask[:, -completion_width:].bool()
    predictor = scored.reshape(-1).nonzero().squeeze(1) - 1
    batch = (input_ids, attention_mask, completion_width)
    return _score(model, inputs, predictor, batch, with_entropy, attention_mask if with_router else None)
