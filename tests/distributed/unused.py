"""What test_unused.py runs on several processes: `unused.py FOLDER` saves what each run has learned.

Few completions contribute to a step, so some processes run a filler, whose tokens choose experts of their own.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.experts import with_experts
from tests.support.launch import leave
from tests.support.selection import selected
from tests.support.tiny import prompts
from tests.support.trainers import change, make, on

SGD = {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.5, "max_grad_norm": 0.0}
RUNS: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "adamw": {"weight_decay": 0.1},
    "bitwise": {"weight_decay": 0.1, "bitwise_invariant": True, "adam_epsilon": 1e-8},
    "clamp": {**SGD, "bitwise_invariant": True},
    "noise": SGD,
    "watched": SGD,
}
FULL = ("adamw", "clamp", "noise")
HOOKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp": lambda gradient: gradient.clamp(-1e-3, 1e-3) * (gradient > 0),
    "noise": lambda gradient: gradient + 1e-3 * torch.randn_like(gradient),
}
# hooks of single processes: the main process watches, and what another one returns does not count
WATCHED = {"0": lambda gradient: None, "2": HOOKS["clamp"]}


def one_group_teaches(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """The completions of the longest prompt differ; those of the others add nothing."""
    longest = max(prompts, key=len)
    return [float(number % 2) if prompt == longest else 0.5 for number, prompt in enumerate(prompts)]


def run(folder: Path, name: str, reward: Any = one_group_teaches, **changes: Any) -> tuple[torch.Tensor, list[Any]]:
    """The update, and the experts of each step that the optimizer moved."""
    sizes = {"num_generations": 2, "global_batch_size": 8, "per_device_train_batch_size": 3, "rollout_chunk_size": 8}
    settings = {**sizes, "max_completion_length": 4, **RUNS[name], **changes}
    used: list[list[str]] = []
    trainer = make(folder / name, with_experts(), reward, train_dataset=prompts(), **settings)

    def note(state: Any) -> None:
        parameters = trainer.model.named_parameters()
        used.append([path for path, p in parameters if ".experts." in path and p.grad is not None])

    hook = WATCHED.get(os.environ.get("RANK", "")) if name == "watched" else HOOKS.get(name)
    for parameter in trainer.model.parameters() if hook is not None else ():
        parameter.register_hook(hook)
    trainer.add_callback(on("on_pre_optimizer_step", note))
    return change(trainer), used


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    for name in selected(RUNS, FULL):
        update, used = run(folder, name)
        torch.save(update, folder / f"{name}_{rank}.pt")
        (folder / f"{name}_{rank}.json").write_text(json.dumps(used))
    leave(folder)
