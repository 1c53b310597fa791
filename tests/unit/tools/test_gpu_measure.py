"""`make test-gpu` beyond its tests: what it prints, within its time, and how it finds the largest micro-batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from grpo_ext.tools.stock import OURS, STOCK
from tests.gpu import measure


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


@pytest.mark.full
def test_what_its_time_does_not_allow_is_named():
    status, found = run("--seconds", "1")
    assert status == 1
    assert found["not_finished"] == ["tests", *(f"toy: {trainer}" for trainer in measure.TRAINERS)]
    assert {one["not_finished"] for one in found["bench"]["toy"].values()} == {"out of time"}


def test_two_results_are_compared_line_by_line():
    def result(failed: list[str], **trainers: Any) -> dict[str, Any]:
        return {"tests": {"failed": dict.fromkeys(failed, "")}, "bench": {"toy": trainers}}

    before = result(["old"], packed={"seconds": 2.0, "peak_mib": 100})
    after = result(["new"], packed={"seconds": 1.0, "peak_mib": 150}, padded={"not_finished": "out of time"})
    assert list(measure.compare(before, after)) == [
        "no longer fails: old",
        "fails now: new",
        "toy, packed: 1.000 s, 0.50 times before; memory 1.50 times",
        "toy, padded: out of time",
    ]


@pytest.mark.parametrize(("visible", "left"), [(None, "0"), ("2,3", "2"), ("GPU-5ebe9f43", "GPU-5ebe9f43")])
def test_one_device_of_several_is_left(monkeypatch, visible, left):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")  # put back at the end
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    measure.one_device()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
