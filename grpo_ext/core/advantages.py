"""Group-relative advantages, computed over whole groups before anything is split (GRPO, arXiv 2402.03300, eq. 3).

The numbers are TRL's (`GRPOTrainer._generate_and_score_completions`), as pure functions of the rewards of the whole
rollout batch. Stands between rewards and the window. Shapes: B completions, F reward functions, groups contiguous.
"""

from __future__ import annotations

import torch

from ..errors import ConfigError

EPSILON = 1e-4  # TRL's guard against a zero standard deviation


def nan_std(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """Standard deviation with Bessel's correction over the entries that are not NaN; NaN where fewer than two are."""
    dims = tuple(range(x.dim())) if dim is None else (dim,)
    count = (~torch.isnan(x)).sum(dim=dims, keepdim=True)
    centred = x - torch.nanmean(x, dim=dims, keepdim=True)
    variance = torch.nansum(centred**2, dim=dims, keepdim=True) / (count - 1)
    std = torch.where(count > 1, variance, torch.nan).sqrt()
    return std if keepdim else std.squeeze(dims)


def group_advantages(
    rewards_BF: torch.Tensor,
    weights_F: torch.Tensor,
    num_generations: int,
    scale_rewards: str = "group",
    aggregation: str = "sum_then_normalize",
) -> torch.Tensor:
    """Advantages of a rollout batch, shape (B,).

    Args:
        rewards_BF: rewards of the whole rollout batch in global order; NaN where a function returned `None`.
        weights_F: weight of each reward function.
        num_generations: completions per group; B is a multiple of it.
        scale_rewards: "group", "batch" or "none": which standard deviation divides the centred reward.
        aggregation: TRL's `multi_objective_aggregation`: "sum_then_normalize" (GRPO) or "normalize_then_sum" (GDPO,
            arXiv 2601.05242).

    Returns:
        The advantages; zero for a completion that no function scored.

    Raises:
        ConfigError: an unknown mode.
    """
    if aggregation == "sum_then_normalize":
        advantages = _sum_then_normalize(rewards_BF, weights_F, num_generations, scale_rewards)
    elif aggregation == "normalize_then_sum":
        advantages = _normalize_then_sum(rewards_BF, weights_F, num_generations)
    else:
        raise ConfigError(
            f"multi_objective_aggregation={aggregation!r} is unknown; use 'sum_then_normalize' or 'normalize_then_sum'."
        )
    return torch.nan_to_num(advantages, nan=0.0)


def weighted_sum(rewards_BF: torch.Tensor, weights_F: torch.Tensor) -> torch.Tensor:
    """Weighted sum over the functions that scored a completion, shape (B,); NaN where none did."""
    total = (rewards_BF * weights_F.to(rewards_BF)).nansum(dim=1)
    return torch.where(torch.isnan(rewards_BF).all(dim=1), torch.nan, total)


def _sum_then_normalize(
    rewards_BF: torch.Tensor, weights_F: torch.Tensor, num_generations: int, scale_rewards: str
) -> torch.Tensor:
    rewards = weighted_sum(rewards_BF, weights_F)
    grouped = rewards.view(-1, num_generations)
    centred = (grouped - torch.nanmean(grouped, dim=1, keepdim=True)).view(-1)
    if scale_rewards == "none":
        return centred
    if scale_rewards == "group":
        std = nan_std(grouped, dim=1, keepdim=True) if num_generations > 1 else torch.zeros_like(grouped[:, :1])
        return centred / (std.expand_as(grouped).reshape(-1) + EPSILON)
    if scale_rewards == "batch":
        std = nan_std(rewards) if rewards.numel() > 1 else torch.zeros((), device=rewards.device)
        return centred / (std + EPSILON)
    raise ConfigError(f"scale_rewards={scale_rewards!r} is unknown; use 'group', 'batch' or 'none'.")


def _normalize_then_sum(rewards_BF: torch.Tensor, weights_F: torch.Tensor, num_generations: int) -> torch.Tensor:
    grouped = rewards_BF.view(-1, num_generations, rewards_BF.size(1))
    mean = torch.nanmean(grouped, dim=1, keepdim=True)
    std = nan_std(grouped, dim=1, keepdim=True) if num_generations > 1 else torch.zeros_like(mean)
    rewards = weighted_sum(((grouped - mean) / (std + EPSILON)).view_as(rewards_BF), weights_F)
    unscored = torch.isnan(rewards_BF).all(dim=1)
    rewards = torch.where(unscored, torch.nan, torch.nan_to_num(rewards, nan=0.0))
    batch_std = nan_std(rewards) if rewards.numel() > 1 else torch.zeros((), device=rewards.device)
    return (rewards - torch.nanmean(rewards)) / (batch_std + EPSILON)
