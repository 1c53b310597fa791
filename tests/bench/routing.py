"""What replayed routing keeps in bfloat16: `python -m tests.bench.routing [SEEDS]`, a Markdown table.

A tiny model with experts whose scores lie close, and a dense one of its size. One rollout batch of 64 completions is
trained on in micro-batches of 16 and of 3; the update error is the relative difference of the two updates, and
`logp_difference` that of the sampler's log-probabilities and training's before the first step. Medians of the seeds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import prompts, tiny_model
from tests.support.trainers import change, make

EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}
RUNS: dict[str, dict[str, Any]] = {
    "dense": {"model": "qwen2"},
    "experts": {"model": "moe"},
    "experts, replayed": {"model": "moe", "routing_replay": True},
}
SIZES = (16, 3)
_CLOSE = 0.03
SETTINGS: dict[str, Any] = {
    **{"global_batch_size": 64, "max_steps": 1, "max_completion_length": 32, "bf16": True},
    **{"router_aux_loss_coef": 0.0, "disable_tqdm": True},
}


def model_of(kind: str, seed: int) -> Any:
    """A model whose experts get scores that lie close, as the weights of a router differ little from their mean."""
    model = tiny_model(kind, seed, **(EXPERTS if kind == "moe" else {}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.copy_(weight.mean(0) + _CLOSE * (weight - weight.mean(0)))
    return model


def run(folder: Path, model: str, seed: int, **settings: Any) -> tuple[float, float, float]:
    """The update error of two splits, `logp_difference`, and the share of choices that changed in the first step."""
    changes, log = [], {}
    for size in SIZES:
        network = model_of(model, seed)
        sizes = {"per_device_train_batch_size": size, "seed": seed, "train_dataset": prompts(24, seed)}
        trainer = make(folder / str(size), network, **SETTINGS, **sizes, **settings)
        changes.append(change(trainer))
        log = trainer.state.log_history[0]
    error = float((changes[1] - changes[0]).norm() / changes[0].norm())
    return error, log["sampling/logp_difference"], log.get("routing/changed_share", float("nan"))


def main(seeds: int = 5) -> None:
    """Print the table."""
    values: dict[str, list[tuple[float, float, float]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for name, settings in RUNS.items():
                values[name].append(run(Path(folder) / f"{name}-{seed}", seed=seed, **settings))
    print("| bfloat16 | update error of two splits | logp_difference | changed share |")
    print("|---|---|---|---|")
    for name, rows in values.items():
        error, difference, share = (statistics.median(column) for column in zip(*rows))
        print(f"| {name} | {error:.1e} | {difference:.1e} | {share:.3f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
