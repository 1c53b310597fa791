"""Run by test_two_processes.py on two processes: trains a little and writes what each process saw."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.tools.check.worker import leave
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer

LOGGED = ("letters", "eval_letters", "rewards", "eval_rewards", "reward", "eval_reward")


def ranked(prompts, completions, completion_ids, environments=None, **kwargs):
    """A reward that looks beyond the group: the rank of a length among all that it is called with."""
    lengths = [len(ids) for ids in completion_ids]
    return [sum(length < other for other in lengths) / len(lengths) for length in lengths]


async def judged(prompts, completions, log_metric, log_extra, **kwargs):
    """Logs now and then: a metric and a column where a completion of the call has an a, another column elsewhere."""
    found = [text.count("a") for text in completions]
    if any(found):
        log_metric("letters", sum(found) / 7)
        log_metric("letters", max(found) / 3)
        log_extra("a", found)
    else:
        log_extra("none", [text[:2] for text in completions])
    return [0.01 * n for n in found]


def answer(input_ids, attention_mask, generation_config):
    """A `generate` of the user's own: answers follow from the prompt and the place in its group."""
    rows = []
    for row, (ids, mask) in enumerate(zip(input_ids, attention_mask)):
        source = random.Random(str((ids[mask.bool()].tolist(), row % 4)))
        rows.append([source.randint(1, 12) for _ in range(10)])
    return torch.cat([input_ids, torch.tensor(rows)], dim=1)


def main(folder: Path, groups: int, chunk: int = 4, own: bool = False) -> dict[str, Any]:
    """Train and evaluate on this process; returns what it saw."""
    scored: list[tuple[str, str]] = []

    def reward(prompts, completions, **kwargs):
        scored.extend(zip(prompts, completions))
        return letter_reward(prompts, completions)

    sizes = {"global_batch_size": 4 * groups, "rollout_chunk_size": chunk, "per_device_train_batch_size": 3}
    # every process makes weights of its own, and those of the first count
    model, asked = tiny_model(seed=int(os.environ.get("RANK", "0"))), []
    if own:
        model.generate = lambda **kwargs: (asked.append(len(kwargs["input_ids"])), answer(**kwargs))[1]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward, ranked, judged],
        args=GRPOConfig(**config_kwargs(folder / "out", beta=0.1, eval_pass_threshold=0.0, **sizes)),
        train_dataset=prompts(),
        eval_dataset=prompts(3, seed=1),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    training_scored = list(scored)
    metrics = trainer.evaluate()
    seen = {
        "processes": trainer.accelerator.num_processes,
        "scored": training_scored,
        "asked": asked,
        "evaluated": len(scored) - len(training_scored),
        "logged_prompts": len(trainer._logs["prompt"]),
        "eval_reward": metrics["eval_reward"],
        "passes": {name: value for name, value in metrics.items() if "@" in name},
        "kl": [line["kl"] for line in trainer.state.log_history if "kl" in line],
        "parameters": sum(float(p.detach().double().sum()) for p in trainer.model.parameters()),
        "metrics": [
            {name: value for name, value in line.items() if name.split("/")[0] in LOGGED}
            for line in trainer.state.log_history
        ],
        "table": {name: list(values) for name, values in trainer._logs["extra"].items()},
    }
    (folder / f"rank_{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), own="own" in sys.argv)
    leave(Path(sys.argv[1]))
