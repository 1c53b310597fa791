"""What benches of whole steps share: a clock of steps, and the settings of a step that computes little."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

SETTINGS: dict[str, Any] = {
    "global_batch_size": 32,
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


class Clock(TrainerCallback):
    """When steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
