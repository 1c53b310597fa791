"""Seconds that an import takes, ours against TRL's: `python -m tests.packaging.import_time [rounds]`.
Medians of processes that take turns, so that other work on the machine meets all of them."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

STATEMENTS = ("import grpo_ext", "import trl", "from trl import GRPOTrainer", "from grpo_ext import GRPOTrainer")


def seconds(statement: str) -> tuple[float, float]:
    """(wall, processor) time of a process that runs one statement."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(rounds: int) -> None:
    """Print a median for each statement."""
    for statement in STATEMENTS:
        seconds(statement)  # the files are in the cache from here on
    taken: dict[str, list[tuple[float, float]]] = {statement: [] for statement in STATEMENTS}
    for _ in range(rounds):
        for statement, values in taken.items():
            values.append(seconds(statement))
    for statement, values in taken.items():
        wall, processor = (statistics.median(times) for times in zip(*values))
        print(f"{statement:34} {wall:6.2f} s, processor {processor:6.2f} s (medians of {rounds})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
