"""The exact loss of a step, by one loop over its tokens, from the papers; trainers are compared with its gradient.

No padding, no batches, no packs, no masks: each completion runs alone, and each token adds one term. Only the loss is
that of a paper: advantages are always those of GRPO (RLOO's have no deviation).

| loss | paper |
|---|---|
| grpo | DeepSeekMath, arXiv 2402.03300, equation 3 |
| bnpo | the same terms over the number of tokens of the step; TRL's is that of the local batch |
| dr_grpo | the denominator of Understanding R1-Zero-Like Training, arXiv 2503.20783 |
| dapo | DAPO, arXiv 2503.14476, equation 8 |
| cispo | MiniMax-M1, arXiv 2506.13585, equation 4; only the upper bound |
| sapo | Soft Adaptive Policy Optimization, arXiv 2511.20347 |
| gspo | Group Sequence Policy Optimization, arXiv 2507.18071, equation 5 |
| rloo | Back to Basics, arXiv 2402.14740, equation 8, with the clipped ratio of completions of TRL's RLOOTrainer |
| luspo | Length-Unbiased Sequence Policy Optimization, arXiv 2602.05261 |
| vespo | Variational Sequence-Level Soft Policy Optimization, arXiv 2602.10693 |
| top entropy | Beyond the 80/20 Rule, arXiv 2506.01939, equation 5, the threshold that of the step |
| KL | k3 of Schulman, times the ratio as in DeepSeek-V3.2, arXiv 2512.02556 |
| load balance | Switch Transformers, arXiv 2101.03961, equation 4 as in transformers: top-k, all layers together |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.conform.given import GROUP, MAX_LENGTH, Objective, Row, groups, log_probs, scores

LOW, HIGH = 0.8, 1.2  # bounds of the ratio
TEMPERATURES = 1.0, 1.05  # SAPO's, for advantages above 0 and others
GAMMAS = (2.0, 3.0), (3.0, 2.0)  # VESPO's k and lambda, for advantages from 0 and below


@dataclass(frozen=True)
class Definition:
    """Where trainers differ by definition, not by error."""

    epsilon: float = 1e-4  # added to the deviation of a group's rewards
    trains_tools: bool = False  # has no mask for what tools write, so these tokens are trained
    most_kl: float = math.inf  # bound of a token's KL term, from which on it has no gradient


def advantages(rows: list[Row], definition: Definition, leave_one_out: bool = False) -> list[float]:
    found = []
    for group in groups(rows):
        rewards = [row.reward for row in group]
        mean = sum(rewards) / GROUP
        deviation = (sum((reward - mean) ** 2 for reward in rewards) / (GROUP - 1)) ** 0.5
        for reward in rewards:
            if leave_one_out:
                found.append(reward - (sum(rewards) - reward) / (GROUP - 1))
            else:
                found.append((reward - mean) / (deviation + definition.epsilon))
    return found


def clipped(ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(LOW, HIGH) * advantage)


def term(loss: str, ratio: Any, logp: Any, advantage: float, log_ratio_of_row: Any) -> Any:
    """What a token adds to the objective, which is maximised."""
    if loss == "cispo":
        return ratio.detach().clamp(max=HIGH) * advantage * logp
    if loss == "sapo":
        temperature = TEMPERATURES[advantage <= 0]
        return torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage
    if loss == "vespo":
        k, rate = GAMMAS[advantage < 0]
        weight = torch.exp(rate + k * log_ratio_of_row - rate * torch.exp(log_ratio_of_row)).detach()
        return weight * advantage * logp
    return clipped(ratio, advantage)


def loss(
    objective: Objective,
    rows: list[Row],
    policy: Any,
    reference: Any = None,
    definition: Definition = Definition(),
) -> torch.Tensor:
    """The loss of a step, whose gradient the update follows."""
    of_rows, tokens, entropy = [], 0, torch.zeros(())
    lowest = lowest_entropy(rows, policy, objective.top_entropy) if objective.top_entropy < 1 else None
    for row, advantage in zip(rows, advantages(rows, definition, objective.loss == "rloo"), strict=True):
        logps_TV = scores(policy, row)
        logps = [logps_TV[place, word] for place, word in enumerate(row.ids)]
        counted = [place for place, kept in enumerate(objective.mask(row)) if kept or definition.trains_tools]
        log_ratios = {place: logps[place] - row.sampler_logps[place] for place in counted}
        log_ratio_of_row = sum(log_ratios.values(), torch.zeros(()))
        tokens += len(counted)
        if objective.loss == "rloo":
            of_rows.append(clipped(log_ratio_of_row.exp(), advantage))
            continue
        reference_logps = log_probs(reference, row).detach() if objective.kl else ()
        of_row = torch.zeros(())
        for place in counted:
            if lowest is not None and float(entropies(logps_TV[place])) < lowest:
                continue  # no policy term; the token still counts
            log_ratio = log_ratio_of_row / len(counted) if objective.sequence else log_ratios[place]
            of_row = of_row + term(objective.loss, log_ratio.exp(), logps[place], advantage, log_ratio_of_row.detach())
            if objective.kl:
                to_reference = reference_logps[place] - logps[place]
                k3 = to_reference.exp() - to_reference - 1
                of_row = of_row - objective.kl * (k3 * log_ratios[place].exp()).clamp(max=definition.most_kl)
            entropy = entropy + entropies(logps_TV[place])
        if objective.loss in ("grpo", "sapo"):
            of_row = of_row / max(len(counted), 1)
        of_rows.append(of_row)
    counts = {
        "grpo": len(rows),
        "sapo": len(rows),
        "luspo": len(rows),
        "rloo": len(rows),
        "dr_grpo": len(rows) * MAX_LENGTH,
    }
    total = -sum(of_rows, torch.zeros(())) / counts.get(objective.loss, tokens)
    total = total - objective.entropy * entropy / tokens
    return total + objective.router * load_balance(rows, policy) if objective.router else total


def entropies(logps_TV: torch.Tensor) -> torch.Tensor:
    return -(logps_TV.exp() * logps_TV).sum(-1)


def lowest_entropy(rows: Sequence[Row], policy: Any, share: float) -> float:
    """The entropy from which on tokens have a policy term: the quantile over all trained tokens of the step."""
    with torch.no_grad():
        found = [entropies(scores(policy, row))[torch.tensor(row.trained, dtype=torch.bool)] for row in rows]
    return float(torch.cat(found).quantile(1 - share))


def load_balance(rows: Sequence[Row], policy: Any) -> torch.Tensor:
    """Experts times the sum, over experts, of the share of choices and the mean probability, over all tokens."""
    chosen, probabilities = [], []
    for row in rows:
        ids = torch.tensor([row.prompt_ids + row.ids])
        for logits_TE in policy(input_ids=ids, output_router_logits=True).router_logits:
            for token in logits_TE.softmax(-1):
                probabilities.append(token)
                chosen += token.topk(policy.config.num_experts_per_tok).indices.tolist()
    experts = range(policy.config.num_experts)
    shares = torch.tensor([chosen.count(expert) / len(probabilities) for expert in experts])
    return len(experts) * (shares * torch.stack(probabilities).mean(0)).sum()
