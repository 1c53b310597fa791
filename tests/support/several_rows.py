"""Rollouts of several rows, made at random, and what training on them is by a plain loop, one forward for each row.

The loop reads as the rules do: every row runs alone, without packs, and no row is joined to another; a sequence is a
rollout, over all of its rows; denominators are sums over the rollouts of the step. It uses nothing of the package.
"""

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch


class Row(NamedTuple):
    """What a `rollout_func` returns of a row."""

    prompt_ids: list[int]
    ids: list[int]
    mask: list[int]  # 1: sampled by the model

    @property
    def whole(self) -> list[int]:
        return [*self.prompt_ids, *self.ids]


@dataclass(frozen=True)
class Rollout:
    rows: list[Row]
    group: int
    reward: float | None
    advantage: float = 0.0

    @property
    def trained(self) -> int:
        return sum(sum(row.mask) for row in self.rows)


def sampled(source: random.Random, context: Sequence[int], most: int = 5) -> Row:
    ids = source.choices(range(3, 40), k=source.randint(2, most))
    return Row([*context], ids, [1] * len(ids))


def of_tools(row: Row) -> Row:
    return row._replace(mask=[0] * len(row.ids))


def fork(prompt: list[int], source: random.Random) -> list[Row]:
    first = sampled(source, prompt)
    return [first, sampled(source, first.whole[:-1]), sampled(source, prompt), sampled(source, first.whole)]


def dropped_middle(prompt: list[int], source: random.Random) -> list[Row]:
    """Earlier thinking is left out of later contexts; a tool answers between."""
    rows = [sampled(source, prompt)]
    while len(rows) < 3:
        answer = source.choices(range(3, 40), k=2)
        rows.append(sampled(source, [*rows[-1].prompt_ids, *rows[-1].ids[-1:], *answer]))
    return rows


def retried(prompt: list[int], source: random.Random) -> list[Row]:
    """Two calls that sample the same tokens in the same context, and one that continues."""
    first = sampled(source, prompt)
    return [first, first, sampled(source, first.whole)]


def with_empty_row(prompt: list[int], source: random.Random) -> list[Row]:
    return [sampled(source, prompt), Row([*prompt, 5], [], []), sampled(source, prompt[:-1])]


def with_tool_row(prompt: list[int], source: random.Random) -> list[Row]:
    return [of_tools(sampled(source, prompt)), sampled(source, [*prompt, 7]), of_tools(sampled(source, prompt))]


def tools_alone(prompt: list[int], source: random.Random) -> list[Row]:
    return [of_tools(sampled(source, prompt)) for _ in range(2)]


def rewritten_system(prompt: list[int], source: random.Random) -> list[Row]:
    first = sampled(source, prompt)
    second = sampled(source, [9, *first.whole[1:]])
    return [first, second, sampled(source, [*second.whole, 4]), sampled(source, first.whole)]


def continued(prompt: list[int], source: random.Random) -> list[Row]:
    """Rows that extend each other, with tokens of a tool in a row and between two."""
    first = sampled(source, prompt)
    second = sampled(source, [*first.whole, 6, 8])
    second = second._replace(mask=[0, *second.mask[1:]])
    return [first, second, sampled(source, second.whole)]


def single(prompt: list[int], source: random.Random) -> list[Row]:
    return [sampled(source, prompt, 12)]


SAMPLED = -4.8  # the log-probability of every token, as the sampler reports it
KINDS = (fork, dropped_middle, retried, with_empty_row, with_tool_row, tools_alone, rewritten_system, continued, single)


@dataclass
class Agent:
    """A `rollout_func`, and the reward function of its rollouts, which are kept. Rows of rollouts are interleaved."""

    kinds: Sequence[Callable[[list[int], random.Random], list[Row]]] = KINDS
    change: Callable[[list[Row]], list[Row]] = lambda rows: rows
    ids_of: Callable[[Any, Any], list[int]] = lambda prompt, trainer: trainer.processing_class(prompt)["input_ids"]
    rollouts: list[Rollout] = field(default_factory=list)
    rewarded: list[dict[str, Any]] = field(default_factory=list)  # what the reward function was called with

    def rollouts_of(self, prompts: list[str], trainer: Any) -> list[Rollout]:
        found, group = list[Rollout](), trainer.num_generations
        for place, prompt in enumerate(prompts):
            source = random.Random(f"{prompt}/{place}")
            # sums of a group, and of three in it, divide without rounding
            reward = (None, 3.0, 1.5, -1.5)[place % 4] if place < 4 else float(source.randint(-4, 4))
            ids = self.ids_of(prompt, trainer)
            rows = self.change(self.kinds[place % len(self.kinds)](ids, source))
            found.append(Rollout(rows, place // group, reward))
        return found

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        rollouts = self.rollouts_of(prompts, trainer)
        self.rollouts += rollouts
        pairs = [(number, row) for number, rollout in enumerate(rollouts) for row in rollout.rows]
        order = list(range(len(pairs)))
        random.Random(len(prompts)).shuffle(order)
        numbers = [pairs[place][0] for place in order]
        left = [[row for number, row in pairs if number == n] for n in range(len(rollouts))]
        rows = [left[number].pop(0) for number in numbers]  # in order within a rollout
        return {
            "rollout_ids": numbers,
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.ids for row in rows],
            "env_mask": [row.mask for row in rows],
            "logprobs": [[SAMPLED] * len(row.ids) for row in rows],
            "score": [rollout.reward for rollout in rollouts],
        }

    def reward(
        self, prompts: list[Any], completions: list[Any], score: list[float | None], **columns: Any
    ) -> list[float | None]:
        self.rewarded.append({"prompts": prompts, "completions": completions, **columns})
        return score


@dataclass(frozen=True)
class Plain:
    """Settings of the loss, by TRL's names."""

    loss_type: str = "grpo"
    importance_sampling_level: str = "token"
    loss_aggregation: str | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    entropy_coef: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float = 0.3
    temperature: float = 0.8
    max_completion_length: int = 24
    sapo_temperature_neg: float = 1.25  # a number of few bits: torch.where makes it float32
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    sequence_mask_low: float | None = None
    router_aux_loss_coef: float = 0.0  # of a mixture of experts
    learning_rate: float = 0.1


Scores = list[list[tuple[torch.Tensor, torch.Tensor]]]  # log-probabilities and entropies of each row of each rollout


def scores_of(model: Any, rollouts: Sequence[Rollout], temperature: float) -> Scores:
    def of_row(row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TV = model(input_ids=torch.tensor([row.whole])).logits[0, len(row.prompt_ids) - 1 :][: len(row.ids)]
        logps_TV = (logits_TV / temperature).log_softmax(-1)
        ids = torch.tensor(row.ids, dtype=torch.long)
        return logps_TV.gather(1, ids[:, None])[:, 0], -(logps_TV.exp() * logps_TV).sum(-1)

    return [[of_row(row) for row in rollout.rows] for rollout in rollouts]


def with_advantages(rollouts: Sequence[Rollout], by_rows: bool = False) -> list[Rollout]:
    """Advantages are rewards minus the mean of their group; 0 without a reward.

    `by_rows` is the mistake of weighting rollouts in the mean by their rows.
    """
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        times = (rollout.reward is not None) * (len(rollout.rows) if by_rows else 1)
        groups.setdefault(rollout.group, []).extend([rollout.reward or 0.0] * times)
    means = {group: sum(rewards) / len(rewards) for group, rewards in groups.items()}
    return [replace(r, advantage=0.0 if r.reward is None else r.reward - means[r.group]) for r in rollouts]


def policy_terms(cfg: Plain, logps_T: torch.Tensor, old_T: torch.Tensor, advantage: float) -> torch.Tensor:
    """The losses of all trained tokens of a rollout without the KL term, and their ratios, (2, T)."""
    log_ratio_T = logps_T - old_T
    if cfg.importance_sampling_level == "sequence":
        log_ratio_T = log_ratio_T.mean().expand(len(logps_T))
    ratio_T = log_ratio_T.exp()
    if cfg.loss_type == "cispo":
        loss_T = -ratio_T.detach().clamp(max=cfg.epsilon_high) * advantage * logps_T
    elif cfg.loss_type == "sapo":
        temperature = 1.0 if advantage > 0 else cfg.sapo_temperature_neg
        loss_T = -torch.sigmoid(temperature * (ratio_T - 1)) * 4 / temperature * advantage
    elif cfg.loss_type == "vespo":
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        log_weight = (logps_T - old_T).sum().detach()
        loss_T = -torch.exp(rate + k * log_weight - rate * log_weight.exp()) * advantage * logps_T
    else:
        clipped_T = ratio_T.clamp(1 - cfg.epsilon, 1 + cfg.epsilon_high)
        loss_T = -torch.minimum(ratio_T * advantage, clipped_T * advantage)
    return torch.stack([loss_T, ratio_T])


def denominator(cfg: Plain, rollouts: Sequence[Rollout], rollout: Rollout) -> float:
    """What a token of a rollout is divided by."""
    usual = {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "sequence_sum_norm", "luspo": "sequence_sum"}
    kind = cfg.loss_aggregation or usual.get(cfg.loss_type, "token_mean")
    of_group = sum(other.trained for other in rollouts if other.group == rollout.group)
    return {
        "token_mean": sum(other.trained for other in rollouts),
        "sequence_mean": rollout.trained * len(rollouts),
        "sequence_sum": len(rollouts),
        "sequence_sum_norm": len(rollouts) * cfg.max_completion_length,
        "prompt_mean": of_group * len({other.group for other in rollouts}),
    }[kind]


def keeps(cfg: Plain, logps_T: torch.Tensor, advantage: float) -> bool:
    """Whether the masks of sequences keep a rollout."""
    log_ratio = float((logps_T.detach() - SAMPLED).mean())
    near = cfg.off_policy_mask_threshold is None or advantage >= 0 or -log_ratio <= cfg.off_policy_mask_threshold
    return near and (cfg.sequence_mask_low is None or math.exp(log_ratio) >= cfg.sequence_mask_low)


def loss_of(cfg: Plain, model: Any, rollouts: Sequence[Rollout], old: Scores, reference: Scores) -> torch.Tensor:
    scores = scores_of(model, rollouts, cfg.temperature)

    def trained(parts: Scores, number: int, kind: int = 0) -> torch.Tensor:
        """The values of a rollout's trained tokens, row after row."""
        rows = zip(parts[number], rollouts[number].rows, strict=True)
        return torch.cat([values[kind][torch.tensor(row.mask, dtype=torch.bool)] for values, row in rows])

    entropies_N = torch.cat([trained(scores, number, 1) for number in range(len(rollouts))])
    lowest = float(entropies_N.detach().quantile(1 - cfg.top_entropy_quantile)) - 1e-5  # for first tokens, all equal
    total = -cfg.entropy_coef * entropies_N[entropies_N >= lowest].mean()
    for number, rollout in enumerate(rollouts):
        if not rollout.trained:
            continue
        logps_T, old_T = trained(scores, number), trained(old, number)
        loss_T, ratio_T = policy_terms(cfg, logps_T, old_T, rollout.advantage)
        loss_T = loss_T * (trained(scores, number, 1) >= lowest) * keeps(cfg, logps_T, rollout.advantage)
        if cfg.beta:
            to_reference_T = trained(reference, number) - logps_T
            kl_T = to_reference_T.exp() - to_reference_T - 1
            loss_T = loss_T + cfg.beta * kl_T * (ratio_T if cfg.use_bias_correction_kl else 1.0)
        total = total + loss_T.sum() / denominator(cfg, rollouts, rollout)
    return total + cfg.router_aux_loss_coef * load_balance(model, rollouts) if cfg.router_aux_loss_coef else total


def plain_change(cfg: Plain, model: Any, rollouts: Sequence[Rollout], steps: int) -> torch.Tensor:
    """What so many steps of SGD on these rollouts change in a copy of the model, float64."""
    model = copy.deepcopy(model)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        old = scores_of(model, rollouts, cfg.temperature)
    for _ in range(steps):
        model.zero_grad()
        loss_of(cfg, model, rollouts, old, old).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= cfg.learning_rate * parameter.grad
    return torch.cat([(p.detach() - s).flatten() for p, s in zip(model.parameters(), start, strict=True)])


def each_row_a_rollout(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The mistake of taking each row for a sequence."""
    return [replace(rollout, rows=[row]) for rollout in rollouts for row in rollout.rows]


def equal_calls_once(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The mistake of finding shared tokens by equality: two calls that sample the same are trained once."""
    return [
        replace(rollout, rows=[row for n, row in enumerate(rollout.rows) if row not in rollout.rows[:n]])
        for rollout in rollouts
    ]


def shared_twice(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The mistake of training a row's context where an earlier row has it as sampled tokens."""

    def with_context(rollout: Rollout) -> list[Row]:
        rows = list[Row]()
        for row in rollout.rows:
            first = next((r for r in rows if row.prompt_ids[: len(r.whole)] == r.whole), None)
            start = len(first.prompt_ids) if first else len(row.prompt_ids)
            between = row.prompt_ids[start:]
            mask = [*(first.mask if first else []), *[0] * len(between)][: len(between)]
            rows.append(Row(row.prompt_ids[:start], [*between, *row.ids], [*mask, *row.mask]))
        return rows

    return [replace(rollout, rows=with_context(rollout)) for rollout in rollouts]


def last_rows(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The mistake of giving the advantage to the last row alone."""
    return [replace(rollout, rows=rollout.rows[-1:]) for rollout in rollouts]


def load_balance(model: Any, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Experts times the sum, over experts, of the share of choices and the mean probability, over all tokens.

    A token counts once for each rollout: not again where a context begins as an earlier row. A rollout without a
    trained token has its prompt and one more.
    """
    chosen, probabilities = [], []
    for rollout in rollouts:
        first, ran = rollout.rows[0], list[list[int]]()
        rows = [row for row in rollout.rows if any(row.mask)] or [Row(first.prompt_ids, first.ids[-1:], [0])]
        for row in rows:
            pairs = [[*zip(row.prompt_ids, earlier)] for earlier in ran]
            again = [next((n for n, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs]
            logits = model(input_ids=torch.tensor([row.whole]), output_router_logits=True).router_logits
            for logits_TE in logits:  # of each layer
                probabilities.append(logits_TE[max(again, default=0) :].softmax(-1))
                chosen.append(probabilities[-1].topk(model.config.num_experts_per_tok).indices.flatten())
            ran.append(row.whole)
    means_E, counts_E = torch.cat(probabilities).mean(0), torch.cat(chosen).bincount(minlength=model.config.num_experts)
    return model.config.num_experts * (counts_E.double() / sum(map(len, probabilities)) * means_E).sum()
