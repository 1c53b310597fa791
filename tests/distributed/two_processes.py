"""Run by test_two_processes.py on two processes: trains a little and writes what each process saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.tools.run_worker import leave
from tests.helpers import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer


def main(folder: Path, groups: int) -> None:
    scored: list[tuple[str, str]] = []

    def reward(prompts, completions, **kwargs):
        scored.extend(zip(prompts, completions))
        return letter_reward(prompts, completions)

    sizes = {"global_batch_size": 4 * groups, "rollout_chunk_size": 4, "per_device_train_batch_size": 3}
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=reward,
        args=GRPOConfig(**config_kwargs(folder / "out", **sizes)),
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
        "evaluated": len(scored) - len(training_scored),
        "logged_prompts": len(trainer._logs["prompt"]),
        "eval_reward": metrics["eval_reward"],
        "parameters": sum(float(p.double().sum()) for p in trainer.model.parameters()),
    }
    (folder / f"rank_{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    leave(Path(sys.argv[1]))
