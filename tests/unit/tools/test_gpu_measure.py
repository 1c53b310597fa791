"""`make test-gpu` beyond its tests: what it prints, within its time, and how it finds the largest micro-batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from grpo_ext.errors import LaunchError
from grpo_ext.tools.stock import OURS, STOCK
from tests.bench.shapes import Shape
from tests.gpu import measure

SHAPE = Shape("x", 16, 4, 8, groups=2, group=4)


def run(*options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.gpu.measure", "--toy", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return done.returncode, json.loads(done.stdout)


@pytest.mark.full
def test_a_rehearsal_measures_every_form_and_stock_trl():
    status, found = run()
    assert (status, found["not_finished"], found["tests"]["failed"]) == (0, [], {})
    assert found["tests"]["passed"] > 50
    assert len(found["tests"]["figures"]) > 5
    runs = found["bench"]["toy"]
    assert {name: one["form"] for name, one in runs.items()} == {
        **{f"{OURS}, {form}": form for form in ("packed", "prefix", "padded")},
        STOCK: "padded",
    }
    for one in runs.values():
        assert (one["steps"], one["micro_batch"]) == (measure.ROUNDS, 8)
        assert one["seconds"] > 0
        assert one["peak_mib"] > one["working_mib"] > 0


def test_what_its_time_does_not_allow_is_named():
    status, found = run("--seconds", "1")
    assert status == 1
    assert found["not_finished"] == ["tests", *(f"toy: {trainer}" for trainer in measure.TRAINERS)]
    assert {one["not_finished"] for one in found["bench"]["toy"].values()} == {"out of time"}


class Fake:
    """A worker of which two completions fit."""

    asked: list[int] = []

    def __init__(self, spec: dict[str, Any], seconds: float, errors: Any) -> None:
        self.asked.append(spec["micro"])
        if spec["micro"] > 2:
            errors.write("Traceback\nCUDA out of memory\n")
            raise LaunchError("it ended")

    def step(self) -> dict[str, Any]:
        return {"seconds": {"step": 2.0}, "tokens": 10, "peak_mib": 3.0, "working_mib": 1.0}

    def close(self) -> None:
        pass


def test_half_a_micro_batch_that_does_not_fit_is_tried(monkeypatch):
    monkeypatch.setattr(measure, "Worker", Fake)
    found = measure.measure(SHAPE, STOCK, {}, 8, time.monotonic() + 60)
    assert Fake.asked == [8, 4, 2]
    assert (found["micro_batch"], found["seconds"], found["tokens_per_second"]) == (2, 2.0, 5.0)
    assert "not_finished" not in found
