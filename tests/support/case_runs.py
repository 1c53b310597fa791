"""Runs whose steps are run again with other settings (`trainer.rerun(step, cases=[...])`)."""

import json
from pathlib import Path
from typing import Any

from grpo_ext.run.record import STEP
from grpo_ext.run.rerun import Rerun
from tests.support.trainers import make

RUN: dict[str, Any] = {
    **{"report_to": "none", "max_steps": 2, "logging_steps": 1, "global_batch_size": 16, "disable_tqdm": True},
    **{"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2, "loss_type": "grpo"},
}
TWICE = {"num_iterations": 2, "rollout_batch_size": 16}  # each rollout batch is trained by two steps
ALL, CLIPPED = "all weights", "clip_ratio/region_mean"


def letters(completions: list[str], **columns: Any) -> list[float]:
    """Small whole numbers, whose means over groups of four are exact."""
    return [float(text.count("a") + text.count("e") - text.count("b")) for text in completions]


def trained(folder: Path, **changes: Any) -> Path:
    make(folder, **{**RUN, **changes}).train()
    return folder


def rerun(folder: Path, step: int, *cases: dict[str, Any], **changes: Any) -> Rerun:
    return make(folder, **{**RUN, **changes}).rerun(step, cases=cases)


def rows_of(again: Rerun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (again.folder / STEP).read_text().splitlines()[1:]]
