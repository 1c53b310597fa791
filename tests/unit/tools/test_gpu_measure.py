"""`make test-gpu` beyond its tests: what it writes, when, and within which time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_ext.tools.stock import OURS
from tests.gpu import measure
from tests.support.gpu import TEST_PARTS

NAMES = [part.name for part in measure.PARTS]


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    file = folder / "gpu.json"
    command = [sys.executable, "-m", "tests.gpu.measure", "--toy", "--output", str(file), *options]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return done.returncode, json.loads(file.read_text())


@pytest.mark.full
def test_a_rehearsal_runs_every_part(tmp_path):
    status, found = run(tmp_path, "--seconds", "900")
    assert (status, found["not_finished"], list(found["parts"])) == (0, [], NAMES)
    tests = {name: part["passed"] for name, part in found["parts"].items() if name in TEST_PARTS}
    assert sum(tests.values()) > 300
    assert {name for name, passed in tests.items() if not passed} == {"flex attention"}
    for part in measure.PARTS:
        runs = found["parts"][part.name].get("runs", {})
        assert list(runs) == [one.name for one in part.runs]
        for one, result in zip(part.runs, runs.values()):
            rows = measure.toy(one).shape.groups * 4
            assert (result["steps"], result["micro_batch"]) == (measure.ROUNDS, rows)
            assert one.forward is None or result["form"] == one.forward
            assert result["seconds"] > 0
            assert result["peak_mib"] > result["working_mib"] > 0
            assert ("planned_mib" in result) == (one.who == OURS and not one.shape.sample)
