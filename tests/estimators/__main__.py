"""Prints the tables of docs/algorithms.md: mean gradients, and those of old samples, beside exact gradients.

    python -m tests.estimators [completions [part of a row's name]]

32,768 completions for each row take about 20 minutes on one core; four times as many halve the standard errors.
"""

import contextlib
import sys

from tests.estimators import objectives as of
from tests.estimators.measure import STEP, Comparison, left_over
from tests.estimators.policy import Distribution, flat_parameters, gradient, log_probs
from tests.estimators.rows import ROWS, Row, log_probability, measured, moved_by, ratio

COMPLETIONS = 32_768
HEADER = """\
| change | compared with the gradient of | factor | points elsewhere (exact) | standard errors | variance | why |
|---|---|---|---|---|---|---|"""


def lines(row: Row, comparisons: list[tuple[Comparison, float]], base_noise: float) -> str:
    """A line of the table for each objective; the variance and the reason stand in the first."""
    step = row.settings.get("global_batch_size", STEP)
    noise, why, name = f"{comparisons[0][0].noise * step / base_noise:.2f}", row.why, row.name
    found = []
    for target, (result, known) in zip(row.targets, comparisons, strict=True):
        left = f"**{result.left:.0%}**" if result.biased else f"< {result.smallest:.0%}"
        left += "" if target is row.targets[-1] else f" ({known:.1%})"
        factor = f"{result.factor:.3f} ± {result.factor_error:.3f}"
        errors = f"{result.norm:.1f}, {result.projection:.1f}"
        found.append(f"| {' | '.join((name, target.words, factor, left, errors, noise, why))} |")
        name = noise = why = ""
    return "\n".join(found)


def distances() -> str:
    """What is left of the gradient of the expected reward on samples of an old policy, by how far it is; exact."""
    terms = {
        "clipped at 0.8 and 1.2": of.clipped(0.8, 1.2),
        "ratios of tokens": ratio,
        "no ratios": log_probability,
        "ratios of completions, at most 3": lambda r, logps, _: of.whole_ratio(r).clamp(max=3) * logps,
    }
    start = flat_parameters()
    found = [f"| KL per token | tokens clipped | {' | '.join(terms)} |", f"|{'---|' * (2 + len(terms))}"]
    for step_size in (0.0005, 0.001, 0.002, 0.004):
        now = moved_by(step_size)
        kl, share = of.distance(Distribution(log_probs(now), log_probs(start)))
        exact_D, cells = gradient(of.expected_reward, now, start), [f"{kl:.3f}", f"{share:.1%}"]
        for term in terms.values():
            found_D = gradient(of.surrogate(term), now, start)
            cells.append(f"{found_D @ exact_D / (exact_D @ exact_D):.2f}, {left_over(found_D, exact_D):.0%}")
        found.append(f"| {' | '.join(cells)} |")
    return "\n".join(found)


def main(completions: int = COMPLETIONS, part: str = "") -> None:
    base_noise = 0.0
    print(HEADER, flush=True)
    for row in ROWS:
        if part in row.name or row is ROWS[0]:
            with contextlib.redirect_stdout(sys.stderr):
                comparisons = measured(row, completions)
            base_noise = base_noise or comparisons[0][0].noise * STEP
            print(lines(row, comparisons, base_noise), flush=True)
    print(f"\n{distances()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
