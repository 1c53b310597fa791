"""This package's trainer: the same completions and settings as TRL's."""

import tempfile
from importlib.metadata import version
from typing import Any

import grpo_ext
from tests.conform.adapters import trl
from tests.conform.given import Gradient, Objective, Row, Split

NAME, VERSION, ENTRY = "grpo_ext", version("grpo_ext"), "GRPOTrainer.train"


def gradient(objective: Objective, split: Split, rows: list[Row], policy: Any, reference: Any) -> Gradient:
    with tempfile.TemporaryDirectory() as folder:
        args = grpo_ext.GRPOConfig(
            f"{folder}/run",
            **trl.settings(objective),
            per_device_train_batch_size=split.micro_batch,
            global_batch_size=trl.STEP,
        )
        return trl.update(trl.with_old_logps(grpo_ext.GRPOTrainer), args, rows, policy, reference)
