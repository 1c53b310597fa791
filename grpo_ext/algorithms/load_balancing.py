"""The load-balancing loss of mixture-of-experts models, as a sum over the micro-batches of a step.

Differs from transformers, where it is a product of two means over a batch: how often each expert is chosen is counted
over the whole step before its first gradient. Shapes: B completions, T tokens, E experts, N tokens of a forward.
"""

import torch


def load_balancing_loss(router_probs_E: torch.Tensor, expert_share_E: torch.Tensor, rows: float) -> torch.Tensor:
    """A micro-batch's part of the load-balancing loss of the step (Switch Transformers, arXiv 2101.03961, eq. 4-6).

    With the share of each expert fixed step-wide, the loss is linear in the router probabilities, hence a sum. A row is
    a token in a layer: probabilities are summed over the micro-batch's rows, shares are per row of the step.
    """
    return len(router_probs_E) * (expert_share_E * router_probs_E).sum() / max(rows, 1)


def router_statistics(
    router_logits: tuple[torch.Tensor, ...],
    counts_BT: torch.Tensor,
    top_k: int,
    replayed_NC: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Sums over the real tokens of a micro-batch and all layers (transformers: `load_balancing_loss_func`).

    Returns how often each expert was chosen (E,), float64 without gradient; summed probabilities (E,) with gradient;
    and the number of rows. Logits are (tokens, E) per layer. A count is above 1 for a prompt of several completions.
    `replayed_NC`: the experts of each token, layer by layer; -1 where the router chose.
    """
    flat = counts_BT.reshape(-1)
    real = flat > 0
    times, device = flat[real], router_logits[0].device
    chosen, probs = [], []
    for layer, logits in enumerate(router_logits):
        layer_probs = torch.softmax(logits.float(), dim=-1)[real.to(logits.device)]
        weights = times.to(layer_probs)
        picked = torch.topk(layer_probs, top_k, dim=-1).indices
        if replayed_NC is not None:
            replayed = replayed_NC[real, layer * top_k : (layer + 1) * top_k].to(picked)
            picked = replayed.where(replayed >= 0, picked)
        layer_chosen = torch.zeros(logits.size(-1), dtype=torch.float64, device=logits.device)
        layer_chosen.index_add_(
            0, picked.reshape(-1), weights.double().repeat_interleave(top_k)
        )  # deterministic, on CUDA too
        chosen.append(layer_chosen.to(device))
        probs.append((layer_probs * weights[:, None]).sum(0).to(device))
    return sum(chosen[1:], chosen[0]), sum(probs[1:], probs[0]), int(flat.sum()) * len(router_logits)
