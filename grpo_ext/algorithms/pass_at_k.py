"""pass@k and mean@k of an evaluation: the share of prompts that one of k samples solves, and the mean reward.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1), in integers where the paper multiplies
ratios, so nothing cancels for any n. Shapes: P prompts, G completions of each.
"""

import math
import re
from collections.abc import Iterable, Sequence

from .exact import exact_mean

PASS = r"(?:.+_)?pass@\d+"  # logged names, with the name of the evaluation set if there are several


def pass_at_k(scored: int, passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) with n = `scored` and c = `passed` (Chen et al. 2021, eq. 1)."""
    draws = math.comb(scored, k)
    return (draws - math.comb(scored - passed, k)) / draws


def logged_k(num_generations: int) -> list[int]:
    """All up to 8, then powers of two, and `num_generations`."""
    powers = (2**i for i in range(num_generations.bit_length()))
    return sorted({*range(1, min(num_generations, 8) + 1), *powers, num_generations})


def are_pass_or_fail(rewards: Iterable[float]) -> bool:
    """Whether all are 0 or 1, up to float32's rounding; NaN (the completion was not scored) counts as either."""
    return all(math.isnan(r) or r == 0.0 or math.isclose(r, 1.0, rel_tol=1e-6) for r in rewards)


def passes(reward: float, threshold: float) -> bool:
    """Whether a reward is at least the threshold, up to float32's rounding; not where it is NaN."""
    return reward > threshold or math.isclose(reward, threshold, rel_tol=1e-6)


def pass_metrics(rewards_PG: Sequence[Sequence[float]], threshold: float | None) -> dict[str, float]:
    """`pass@k` for every k of `logged_k`, and `mean@G`, the mean reward; each a mean over prompts.

    A completion whose reward is NaN does not count; a prompt with fewer than k others is left out of pass@k. Without a
    `threshold`, the least reward that passes, there is no pass@k.
    """
    scored = [row for rewards in rewards_PG if (row := [reward for reward in rewards if not math.isnan(reward)])]
    if not scored:
        return {}
    group = len(rewards_PG[0])
    metrics = {f"mean@{group}": exact_mean([exact_mean(row) for row in scored])}
    if threshold is None:
        return metrics
    passed = [[passes(reward, threshold) for reward in row] for row in scored]
    for k in logged_k(group):
        if values := [pass_at_k(len(row), sum(row), k) for row in passed if len(row) >= k]:
            metrics[f"pass@{k}"] = exact_mean(values)
    return metrics


def first_and_last(names: Iterable[str]) -> list[str]:
    """Names of pass@1 and of pass@k with the largest k, for every evaluation set."""
    sizes = {name: int(name.partition("@")[2]) for name in names if re.fullmatch(PASS, name)}
    return [name for name, k in sizes.items() if k in (1, max(sizes.values()))]
