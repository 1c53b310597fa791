"""Run by test_two_processes.py on two processes: images that an environment shows, and what each process learned."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.tools.check.worker import leave
from tests.support.images import Gallery, calling, image_model, image_processor, image_rows
from tests.support.tiny import config_kwargs
from tests.support.trainers import parameters
from tests.tolerances import ADAM_EPSILON


def main(folder: Path, groups: int) -> torch.Tensor:
    """The update of training on this process."""
    sizes = {"global_batch_size": 4 * groups, "rollout_chunk_size": 4, "per_device_train_batch_size": 3}
    shown = {"max_completion_length": 60, "max_tool_calling_iterations": 2, "num_iterations": 2}
    trainer = GRPOTrainer(
        model=image_model("llava"),
        args=GRPOConfig(**config_kwargs(folder / "out", adam_epsilon=ADAM_EPSILON, **sizes, **shown)),
        train_dataset=image_rows(8).remove_columns("images"),
        processing_class=calling(image_processor("llava")),
        environment_factory=Gallery,
    )
    before = parameters(trainer)
    trainer.train()
    update = parameters(trainer) - before
    torch.save(update, folder / f"rank_{trainer.accelerator.process_index}.pt")
    return update


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    leave(Path(sys.argv[1]))
