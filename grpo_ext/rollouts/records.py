"""What is logged of a rollout batch: TRL's metrics and its table of completions, computed once from what was gathered.

Differs from TRL, which appends them in between, as means of processes' means where vLLM samples. Dynamic sampling logs
once, at the end, of all its rounds. Shapes: B completions, F reward functions.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from ..algorithms.advantages import AdvantageRule, nan_std, weighted_sum
from ..algorithms.exact import exact_mean
from ..algorithms.importance import RatioRule
from ..rewards.calls import add_columns, columns_of, metrics_of
from .join import Round

Metrics = MutableMapping[str, list[float]]  # TRL's record of training or of evaluation


def rollout_metrics(
    rounds: Sequence[Round],
    names: Sequence[str],
    weights_F: torch.Tensor,
    rule: AdvantageRule,
    num_generations: int,
    with_tools: bool,
    ratios: RatioRule | None,
) -> list[tuple[str, float]]:
    """TRL's log values of everything that was sampled for a rollout batch, by TRL's names and in its order.

    Args:
        names: of the reward functions.
        ratios: how vLLM's log-probabilities correct the loss; None where they do not.
    """
    entries = [entry for one in rounds for entry in one.entries]
    rewards_BF = torch.cat([one.rewards_BF for one in rounds])
    lengths_B, truncated_B = ([getattr(e, name) for e in entries] for name in ("tokens", "truncated"))
    values = list(_length_metrics(torch.tensor(lengths_B), torch.tensor(truncated_B)).items())
    if with_tools:
        calls, failures = sum(e.tool_calls for e in entries), sum(e.tool_failures for e in entries)
        values.append(("tools/call_frequency", calls / len(entries)))
        values.append(("tools/failure_frequency", failures / calls if calls else 0.0))
    for name, rewards in zip(names, rewards_BF.unbind(1)):  # several may have one name
        values.append((f"rewards/{name}/mean", torch.nanmean(rewards).item()))
        values.append((f"rewards/{name}/std", nan_std(rewards).item()))
    total = weighted_sum(rewards_BF, weights_F)
    values += [("reward", torch.nanmean(total).item()), ("reward_std", nan_std(total).item())]
    values.append(("frac_reward_zero_std", rule.zero_std_fraction(rewards_BF, weights_F, num_generations)))
    logged = metrics_of([call for one in rounds for call in one.reward_calls])
    values += [(name, exact_mean(numbers)) for name, numbers in logged.items()]
    return values + (list(_sampling_metrics(rounds, ratios).items()) if ratios is not None else [])


def _length_metrics(lengths_B: torch.Tensor, truncated_B: torch.Tensor) -> dict[str, float]:
    ended = lengths_B[~truncated_B] if bool((~truncated_B).any()) else torch.zeros(1)
    values: dict[str, float] = {}
    for kind, lengths in (("length", lengths_B.float()), ("terminated_length", ended.float())):
        for name, value in (("mean", lengths.mean()), ("min", lengths.min()), ("max", lengths.max())):
            values[f"completions/{name}_{kind}"] = value.item()
        if kind == "length":
            values["completions/clipped_ratio"] = truncated_B.float().mean().item()
    return values


def _sampling_metrics(rounds: Sequence[Round], rule: RatioRule) -> dict[str, float]:
    """How far vLLM's log-probabilities are from the policy's, over all completions.

    Tokens that carry no loss, and differences that vLLM could not tell (NaN), do not count. A value is 0 where nothing
    counts, as in TRL.
    """
    deltas, ratios = [], []
    for batch in (one.batch for one in rounds):
        assert batch.old_per_token_logps is not None
        assert batch.sampling_per_token_logps is not None
        assert batch.importance_sampling_ratio is not None
        columns = (batch.loss_masks, batch.old_per_token_logps, batch.sampling_per_token_logps)
        for mask, old, sampling, ratio in zip(*columns, batch.importance_sampling_ratio):
            delta = (old - sampling).abs()[mask.bool()]
            deltas.append(delta[~delta.isnan()])
            ratios.append(ratio if rule.of_sequences else ratio[mask.bool()])
    delta, ratio = torch.cat(deltas).double(), torch.cat(ratios).double()
    ratio = ratio[~ratio.isnan()]
    delta, ratio = (values if len(values) else torch.zeros(1) for values in (delta, ratio))
    return {
        "sampling/sampling_logp_difference/mean": delta.mean().item(),
        "sampling/sampling_logp_difference/max": delta.max().item(),
        "sampling/importance_sampling_ratio/min": ratio.min().item(),
        "sampling/importance_sampling_ratio/mean": ratio.mean().item(),
        "sampling/importance_sampling_ratio/max": ratio.max().item(),
    }


def add_to_table(logs: dict[str, Any], one: Round, names: Sequence[str]) -> None:
    """Add a round to TRL's record of completions.

    Args:
        logs: TRL's record, with bounded columns.
    """
    logs["prompt"].extend(entry.prompt for entry in one.entries)
    logs["completion"].extend(entry.completion for entry in one.entries)
    for name, rewards in zip(names, one.rewards_BF.unbind(1)):
        logs["rewards"][name].extend(rewards.tolist())
    logs["advantages"].extend(one.advantages_B.tolist())
    columns = columns_of(one.reward_calls, len(one))
    add_columns(logs["extra"], columns, len(one), len(logs["prompt"]))
    images = [entry.images for entry in one.entries]
    if any(images) or logs["images"]:
        logs["images"].extend(images)
