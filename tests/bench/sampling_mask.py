"""What replayed sampling masks cost: `python -m tests.bench.sampling_mask QUESTIONS.jsonl [ROUNDS]`, a Markdown table.

SmolLM2-135M (a vocabulary of 49,152), top_p=0.9, 16 completions of up to 32 tokens for each step; medians of the second
step of interleaved runs with and without replay.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.rollouts.batch import KEPT_IDS
from recipes.smollm2 import smollm2

RUNS: dict[str, dict[str, Any]] = {"without": {}, "replay": {"sampling_mask": "replay"}}
PHASES = ("rollout", "train")
SETTINGS: dict[str, Any] = {
    **{"global_batch_size": 16, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 32},
    **{"max_steps": 2, "top_p": 0.9, "bf16": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1},
    **{"disable_tqdm": True, "use_cpu": True, "skip_zero_contribution": False},
}


def token_sum(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward."""
    return [float(sum(ids)) for ids in completion_ids]


def run(folder: Path, model: str, data: Dataset, settings: dict[str, Any]) -> tuple[dict[str, float], Any]:
    """Seconds of the second step by phase, and its rollout batch."""
    args = GRPOConfig(str(folder), **SETTINGS, **settings)
    trainer = GRPOTrainer(model, token_sum, args=args, train_dataset=data)
    trainer.train()
    return {phase: trainer.state.log_history[1][f"time/{phase}"] for phase in PHASES}, trainer._rollouts.batch


def main(questions: Path, rounds: int = 3) -> None:
    """Print the table."""
    model, weights = smollm2()
    lines = questions.read_text().splitlines()[:8]
    prompts = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    data = Dataset.from_dict({"prompt": prompts})
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):  # the first one warms up
            for name, settings in RUNS.items():
                phases, batch = run(Path(folder) / f"{name}-{number}", str(model), data, settings)
                seconds[name] += [phases] if number else []
    print(f"{weights}; medians of {rounds} interleaved runs, {torch.get_num_threads()} threads\n")
    print("| | " + " | ".join(f"{phase}, s" for phase in PHASES) + " | ids per token | bytes per token |")
    print("|---|" + "---|" * (len(PHASES) + 2))
    for name, values in seconds.items():
        cells = [f"{statistics.median(value[phase] for value in values):.2f}" for phase in PHASES]
        ids = len(batch[KEPT_IDS].values) / len(batch["completion_ids"].values) if name == "replay" else 0.0
        print(f"| {name} | " + " | ".join(cells) + f" | {ids:.1f} | {4 * ids + 4 * (name == 'replay'):.0f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
