"""Run by test_two_processes.py on two processes: trains on a rollout that an override has changed and added to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.tools.check.worker import leave
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer
from tests.tolerances import ADAM_EPSILON


class Changing(GRPOTrainer):
    """Leaves a token out, and adds fields of every kind, whose widths differ between processes."""

    shapes: list[list[int]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        ids, rank = scored["completion_ids"], int(os.environ.get("RANK", "0"))
        if ids.size(1) > 3:
            scored["completion_mask"][ids[:, 0] % 2 == 0, 1] = 0
        first = ids[:, 0] / 20
        scored["one"] = first
        scored["few"] = torch.nn.functional.pad(first[:, None], (0, 1 + rank))
        scored["tokens"] = ids / 30 * scored["completion_mask"]
        scored["texts"] = ["a" * (int(n) % 3) for n in ids[:, 0]]
        scored["shift"] = torch.tensor(0.5)
        return scored

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        self.shapes = [list(inputs[name].shape[1:]) for name in ("one", "few", "completion_ids", "tokens")]
        ids, mask = (torch.cat([inputs[f"prompt_{n}"], inputs[f"completion_{n}"]], 1) for n in ("ids", "mask"))
        width = inputs["completion_ids"].size(1)
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, width)
        texts = torch.tensor([float(len(text)) for text in inputs["texts"]])
        by_row = inputs["shift"] + inputs["one"] + inputs["few"].sum(1) + texts
        own = ((logps * inputs["tokens"]).sum(1) * by_row).mean() / self.current_gradient_accumulation_steps
        return super()._compute_loss(model, inputs) + own / 10


def main(folder: Path, groups: int, size: int = 3) -> dict[str, Any]:
    """Train on this process; returns what it learned, and the shapes that the loss was given."""
    sizes = {"global_batch_size": 4 * groups, "rollout_chunk_size": 4, "per_device_train_batch_size": size}
    trainer = Changing(
        model=tiny_model(),
        reward_funcs=letter_reward,
        args=GRPOConfig(**config_kwargs(folder / "out", adam_epsilon=ADAM_EPSILON, num_iterations=2, **sizes)),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    start = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    change = [(p.detach() - before).flatten() for p, before in zip(trainer.model.parameters(), start)]
    return {"update": torch.cat(change).tolist(), "shapes": trainer.shapes}


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), os.environ.get("RANK", "0")
    (folder / f"rank_{rank}.json").write_text(json.dumps(main(folder, int(sys.argv[2]))))
    leave(folder)
