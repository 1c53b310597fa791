"""Prints the table of docs/algorithms.md: every setting's mean gradient beside the exact gradient of an objective.

    python -m tests.estimators [completions [part of a row's name]]

32,768 completions for each row take a quarter of an hour on one core; four times as many halve the standard errors.
"""

import contextlib
import sys

from tests.estimators.measure import STEP, Comparison
from tests.estimators.rows import ROWS, Row, measured

COMPLETIONS = 32_768
HEADER = """\
| setting | beside the gradient of | factor | left over | norm, projection | noise | |
|---|---|---|---|---|---|---|"""


def lines(row: Row, comparisons: list[Comparison], base_noise: float) -> str:
    """A line of the table for each objective; the noise and the remark stand in the first."""
    step = row.settings.get("global_batch_size", STEP)
    noise, remark, name = f"{comparisons[0].noise * step / base_noise:.2f}", row.remark, row.name
    found = []
    for target, result in zip(row.targets, comparisons, strict=True):
        left = f"**{result.left:.0%}**" if result.biased else f"< {result.smallest:.0%}"
        factor = f"{result.factor:.3f} ± {result.factor_error:.3f}"
        errors = f"{result.norm:.1f}, {result.projection:.1f}"
        found.append(f"| {' | '.join((name, target.words, factor, left, errors, noise, remark))} |")
        name = noise = remark = ""
    return "\n".join(found)


def main(completions: int = COMPLETIONS, part: str = "") -> None:
    base_noise = 0.0
    print(HEADER, flush=True)
    for row in ROWS:
        if part in row.name or row is ROWS[0]:
            with contextlib.redirect_stdout(sys.stderr):
                comparisons = measured(row, completions)
            base_noise = base_noise or comparisons[0].noise * STEP
            print(lines(row, comparisons, base_noise), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
