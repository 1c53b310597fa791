"""How far splits differ on weights in 4 and 8 bits: `python -m tests.bench.quantised [STEPS]`, a Markdown table.

Update errors of a tiny model after 2 AdamW steps of 16 completions, of micro-batches of 5 against one of 16. The least
and the largest of four seeds. Two minutes.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from peft import LoraConfig

from grpo_ext.tools.check.comparison import update_error
from grpo_ext.tools.check.runs import Run, RunResult, train
from tests.support.cases import LORA, Bench

SEEDS = (3, 4, 5, 6)
ADAPTERS = (("4bit", "LoRA"), ("4bit", "DoRA"), ("8bit", "LoRA"))  # DoRA on 8 bits is refused
SAMPLED = {"once": 32, "before every step": 16}  # completions of a rollout batch
SPLITS = {"whole": (1, 16), "1 process": (1, 5), "2 processes": (2, 5)}  # processes, completions of a micro-batch


def planned(bench: Bench, steps: int) -> dict[tuple[Any, ...], Run]:
    """A run for every row of the table, seed and split."""
    runs = {}
    for key in itertools.product(ADAPTERS, SAMPLED, SEEDS, SPLITS):
        (bits, kind), sampled, seed, split = key
        settings = {"rollout_batch_size": SAMPLED[sampled], "max_steps": steps, "seed": seed}
        peft, name = LoraConfig(**LORA, use_dora=kind == "DoRA"), f"run-{len(runs)}"
        runs[key] = bench.run(f"lora_{bits}", SPLITS[split][1], name=name, peft=peft, **settings)
    return runs


def main(steps: int = 2) -> None:
    """Print the table."""
    results: dict[tuple[Any, ...], RunResult] = {}
    with tempfile.TemporaryDirectory() as name:
        runs = planned(Bench(Path(name)), steps)
        for processes in (1, 2):
            together = {key: run for key, run in runs.items() if SPLITS[key[-1]][0] == processes}
            results |= dict(zip(together, train(list(together.values()), processes)))
    if failed := [result.error for result in results.values() if result.error is not None]:
        raise RuntimeError(failed[0])
    print("| weights | adapter | sampled | 1 process | 2 processes |\n|---|---|---|---|---|")
    for adapter, sampled in itertools.product(ADAPTERS, SAMPLED):
        cells = [*adapter, sampled]
        for split in ("1 process", "2 processes"):
            pairs = [[results[adapter, sampled, seed, s].delta for s in ("whole", split)] for seed in SEEDS]
            errors = [update_error(*pair) for pair in pairs]
            cells.append(f"{min(errors):.1e} to {max(errors):.1e}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
