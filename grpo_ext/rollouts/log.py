"""What is logged of a rollout batch: TRL's metrics and its table of completions.

Differs from TRL, which logs means of processes' means where vLLM samples; here they are means over all completions.
Called by `Rollouts`, once for each rollout batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..algorithms.advantages import nan_std, weighted_sum
from ..algorithms.exact import exact_mean
from ..algorithms.losses import RatioRule
from ..rewards.guard import columns_of, metrics_of
from ..runtime.messages import logger
from ..view import TrainerView
from .join import Round
from .local import RolloutSettings


@dataclass
class RolloutLog:
    view: TrainerView
    _warned: bool = False

    def add(self, rounds: Sequence[Round], settings: RolloutSettings, further: Mapping[str, float]) -> None:
        """Log rounds, and `further` values."""
        state = self.view.state
        metrics = self.view.metrics["train" if settings.training else "eval"]
        if settings.training:
            entries = [entry for part in rounds for entry in part.entries]
            state.num_input_tokens_seen += sum(entry.prompt_tokens + entry.tokens for entry in entries)
        metrics["num_tokens"] = [state.num_input_tokens_seen]
        for name, value in [*rollout_metrics(rounds, settings), *further.items()]:
            metrics[name].append(value)
            if name == "sampling/kept_mass" and settings.training and not settings.replay.masks and not self._warned:
                self._warned = True
                filters = ", ".join(f"{name}={value}" for name, value in settings.sampler.filters.items())
                logger.warning(
                    f"{filters}: sampling kept {value:.3f} of the probability in the first rollout, and training takes "
                    "log-probabilities over the whole vocabulary, as TRL does; sampling_mask='replay' takes them over "
                    "what was kept."
                )
        for part in rounds:
            _add_to_table(part, settings.functions.names, self.view.logs)


def rollout_metrics(rounds: Sequence[Round], settings: RolloutSettings) -> list[tuple[str, float]]:
    ratios = settings.ratios
    entries = [entry for part in rounds for entry in part.entries]
    rewards_BF = torch.cat([part.rewards_BF for part in rounds])
    lengths_B = torch.tensor([entry.tokens for entry in entries])
    truncated_B = torch.tensor([entry.truncated for entry in entries])
    values = list(_length_metrics(lengths_B, truncated_B).items())
    if settings.chat.tools:
        calls, failures = sum(e.tool_calls for e in entries), sum(e.tool_failures for e in entries)
        values.append(("tools/call_frequency", calls / len(entries)))
        values.append(("tools/failure_frequency", failures / calls if calls else 0.0))
    for name, rewards_B in zip(settings.functions.names, rewards_BF.unbind(1), strict=True):  # names may be alike
        values.append((f"rewards/{name}/mean", torch.nanmean(rewards_B).item()))
        values.append((f"rewards/{name}/std", nan_std(rewards_B).item()))
    total = weighted_sum(rewards_BF, settings.rule.weights_F)
    values += [("reward", torch.nanmean(total).item()), ("reward_std", nan_std(total).item())]
    values.append(("frac_reward_zero_std", settings.rule.zero_std_fraction(rewards_BF)))
    if any(entry.counts for entry in entries):
        for name, otherwise in (("rows", 1), ("context_tokens", 0), ("untrained_tokens", 0)):
            values.append((f"rollout/{name}", sum(e.counts.get(name, otherwise) for e in entries) / len(entries)))
    logged = metrics_of([call for part in rounds for call in part.reward_calls])
    values += [(name, exact_mean(numbers)) for name, numbers in logged.items()]
    mass = math.fsum(entry.kept_mass for entry in entries)
    if settings.sampler.filters and math.isfinite(mass):
        values.append(("sampling/kept_mass", mass / int(lengths_B.sum())))
    if ratios is not None:
        values += _sampling_metrics(rounds, ratios).items()
    return values


def _length_metrics(lengths_B: torch.Tensor, truncated_B: torch.Tensor) -> dict[str, float]:
    ended = lengths_B[~truncated_B] if (~truncated_B).any() else torch.zeros(1)
    values: dict[str, float] = {}
    for kind, lengths in (("length", lengths_B.float()), ("terminated_length", ended.float())):
        for name, value in (("mean", lengths.mean()), ("min", lengths.min()), ("max", lengths.max())):
            values[f"completions/{name}_{kind}"] = value.item()
        if kind == "length":
            values["completions/clipped_ratio"] = truncated_B.float().mean().item()
    return values


def _sampling_metrics(rounds: Sequence[Round], rule: RatioRule) -> dict[str, float]:
    """vLLM's log-probabilities against the policy's, over tokens with loss that are not NaN; 0 where none is."""
    deltas, ratios = [], []
    for batch in (part.batch for part in rounds):
        columns = (batch.loss_masks, batch["old_per_token_logps"], batch["sampling_per_token_logps"])
        for mask, old, sampling, ratio in zip(*columns, batch["importance_sampling_ratio"], strict=True):
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


def _add_to_table(part: Round, names: Sequence[str], table: dict[str, Any]) -> None:
    # the main process writes the table; the others have no texts
    texts = part.texts or [(None, None, None)] * len(part)
    table["prompt"].extend(prompt for prompt, _, _ in texts)
    table["completion"].extend(completion for _, completion, _ in texts)
    images = [images for _, _, images in texts]
    for name, rewards_B in zip(names, part.rewards_BF.unbind(1), strict=True):
        table["rewards"][name].extend(rewards_B.tolist())
    table["advantages"].extend(part.advantages_B.tolist())
    extra, columns = table["extra"], columns_of(part.reward_calls, len(part))
    for name in dict.fromkeys([*extra, *columns]):  # every column stays as long as that of the prompts
        extra[name].extend(columns.get(name, [None] * len(part)))
        extra[name].extendleft([None] * (len(table["prompt"]) - len(extra[name])))
    if any(images) or table["images"]:
        table["images"].extend(images)
