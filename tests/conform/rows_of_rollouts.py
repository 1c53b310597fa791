"""Rules by which trainers weigh rollouts of several rows, for docs/conform.md: the given completions, cut into rows.

A cut changes no token and no context, so the exact update is that of the completions in one piece. Each rule is an
advantage and a weight for the tokens of a row; the issue that describes it is named.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tests.conform import exact
from tests.conform.given import GROUP, OBJECTIVES, Gradient, Row, gradient_of, log_probs, model, read
from tests.conform.table import RIGHT, row
from tests.conform.worker import error

MICRO_BATCH = 4  # rows


class Cut(NamedTuple):
    """A row: some of a completion's tokens, after all before them."""

    number: int  # of the completion, which is the rollout
    completion: Row
    start: int
    stop: int

    @property
    def trained(self) -> int:
        return sum(self.completion.trained[self.start : self.stop])


def cuts_of(rows: Sequence[Row]) -> list[Cut]:
    """Each completion in one to three rows."""
    found = list[Cut]()
    for number, completion in enumerate(rows):
        parts = number % 3 + 1
        places = [len(completion.ids) * part // parts for part in range(parts + 1)]
        found += [Cut(number, completion, *pair) for pair in itertools.pairwise(places) if pair[0] < pair[1]]
    return found


def standardized(reward: float, rewards: Sequence[float]) -> float:
    mean = sum(rewards) / len(rewards)
    deviation = (sum((other - mean) ** 2 for other in rewards) / (len(rewards) - 1)) ** 0.5
    return (reward - mean) / (deviation + exact.Definition().epsilon)


Number = Callable[[Cut, Sequence[Cut]], float]  # of a row, among all of the step


def by_rollouts(cut: Cut, cuts: Sequence[Cut]) -> float:
    rewards = {other.number: other.completion.reward for other in of_group(cut, cuts)}
    return standardized(cut.completion.reward, [*rewards.values()])


def by_rows(cut: Cut, cuts: Sequence[Cut]) -> float:
    return standardized(cut.completion.reward, [other.completion.reward for other in of_group(cut, cuts)])


def over_the_batch(cut: Cut, cuts: Sequence[Cut]) -> float:
    return standardized(cut.completion.reward, [other.completion.reward for other in cuts])


def of_group(cut: Cut, cuts: Sequence[Cut]) -> list[Cut]:
    return [other for other in cuts if other.number // GROUP == cut.number // GROUP]


def token_mean(cut: Cut, cuts: Sequence[Cut]) -> float:
    return 1 / sum(other.trained for other in cuts)


def mean_of_micro_batches(cut: Cut, cuts: Sequence[Cut]) -> float:
    parts = [cuts[start : start + MICRO_BATCH] for start in range(0, len(cuts), MICRO_BATCH)]
    (part,) = (part for part in parts if cut in part)
    return 1 / len(parts) / sum(other.trained for other in part)


def sequence_mean(cut: Cut, cuts: Sequence[Cut]) -> float:
    tokens = sum(other.trained for other in cuts if other.number == cut.number)
    return 1 / len({other.number for other in cuts}) / tokens


def mean_of_rows(cut: Cut, cuts: Sequence[Cut]) -> float:
    return 1 / len(cuts) / max(cut.trained, 1)


RIGHT_WEIGHTS: dict[str, Number] = {"grpo": sequence_mean, "dapo": token_mean}
# the rule, where it is described, its advantage, and its weights where they are not those of rollouts
RULES: tuple[tuple[str, str, Number, dict[str, Number]], ...] = (
    ("rollouts are counted", "here", by_rollouts, {}),
    ("micro-batches divide by their tokens", "huggingface/trl#7206", by_rollouts, {"dapo": mean_of_micro_batches}),
    ("the batch is one group", "THUDM/slime#1414", over_the_batch, {}),
    ("rows weigh in the group's statistics", "radixark/miles#2378", by_rows, {}),
    ("a row is a sequence", "verl-project/verl#7580", by_rollouts, {"grpo": mean_of_rows}),
)


def gradient_by(advantage: Number, weight: Number) -> Gradient:
    """The gradient of the clipped objective with an advantage and a weight for each row."""
    policy, cuts = model(OBJECTIVES["grpo"], torch.float64), cuts_of(read())

    def loss(cut: Cut) -> torch.Tensor:
        whole, part = cut.completion, slice(cut.start, cut.stop)
        ratios = (log_probs(policy, whole) - torch.tensor(whole.sampler_logps, dtype=torch.float64)).exp()
        terms = exact.clipped(ratios, advantage(cut, cuts))[part] * torch.tensor(whole.trained)[part]
        return -weight(cut, cuts) * terms.sum()

    return gradient_of(policy, *(lambda cut=cut: loss(cut) for cut in cuts))


def exact_gradient(name: str) -> Gradient:
    policy = model(OBJECTIVES[name], torch.float64)
    return gradient_of(policy, lambda: exact.loss(OBJECTIVES[name], read(), policy))


def errors_of(advantage: Number, weights: dict[str, Number]) -> dict[str, float]:
    """The error of each objective that the rule is about; of all, where it is one of advantages."""
    both = {**RIGHT_WEIGHTS, **weights}
    return {name: error(gradient_by(advantage, both[name]), exact_gradient(name)) for name in weights or both}


def rules() -> str:
    """The table of the page."""
    lines = [row("rule", "described in", *RIGHT_WEIGHTS), "|---" * (2 + len(RIGHT_WEIGHTS)) + "|"]
    for name, issue, advantage, weights in RULES:
        repository, _, number = issue.partition("#")
        link = f"[{issue.split('/')[-1]}](https://github.com/{repository}/issues/{number})" if number else issue
        errors = errors_of(advantage, weights)
        cells = {name: f"**{off:.2g}**" if off > RIGHT else "below 1e-6" * (off < 1e-6) for name, off in errors.items()}
        lines.append(row(name, link, *(cells.get(objective, "") for objective in RIGHT_WEIGHTS)))
    return "\n".join(lines)
