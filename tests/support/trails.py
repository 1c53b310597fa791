"""Runs whose trails are compared, and the lines of their records."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_ext.run.record import line_of
from grpo_ext.run.trail_comparison import Comparison
from tests.support.trainers import make

RUN: dict[str, Any] = {"report_to": "none", "max_steps": 6, "logging_steps": 1, "global_batch_size": 16}


def run(folder: Path, **changes: Any) -> Path:
    make(folder, **{**RUN, **changes}).train()
    return folder


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write lines of a record with their checksums."""
    plain = ({name: value for name, value in line.items() if name != "crc32"} for line in lines)
    path.write_bytes(b"".join(map(line_of, plain)))


def first_of(found: Comparison) -> tuple[str, int]:
    """The stage and the step of the first difference."""
    assert found.first is not None, found.text
    return found.first.stage, found.first.step
