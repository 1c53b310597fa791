"""Runs whose trails are compared."""

from pathlib import Path
from typing import Any

from grpo_ext.run.trail_comparison import Comparison
from tests.support.trainers import make

RUN: dict[str, Any] = {"report_to": "none", "max_steps": 6, "logging_steps": 1, "global_batch_size": 16}


def run(folder: Path, **changes: Any) -> Path:
    make(folder, **{**RUN, **changes}).train()
    return folder


def first_of(found: Comparison) -> tuple[str, int]:
    """The stage and the step of the first difference."""
    assert found.first is not None, found.text
    return found.first.stage, found.first.step
