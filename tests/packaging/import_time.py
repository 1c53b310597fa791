"""Seconds that an import takes, ours against TRL's: `python -m tests.packaging.import_time [rounds]`.
Medians of processes that take turns, so that other work on the machine meets all of them."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

STATEMENTS = (
    "pass",
    "import grpo_ext",
    "import trl",
    "from trl import GRPOTrainer",
    "from grpo_ext import GRPOTrainer",
)


def seconds(statement: str) -> float:
    """Wall time of a process that runs one statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, capture_output=True)
    return time.perf_counter() - start


def main(rounds: int) -> None:
    """Print a median for each statement."""
    for statement in STATEMENTS:
        seconds(statement)  # the files are in the cache from here on
    taken: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for _ in range(rounds):
        for statement, values in taken.items():
            values.append(seconds(statement))
    for statement, values in taken.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{statement:34} {middle:6.2f} s  ({low:.2f} to {high:.2f}, {rounds} runs)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
