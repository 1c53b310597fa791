"""`make test-gpu` beyond its tests: what it writes, when, and within which time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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


@pytest.mark.full
def test_what_its_time_does_not_allow_is_named(tmp_path):
    status, found = run(tmp_path, "--seconds", "1")
    assert (status, found["not_finished"]) == (1, NAMES)
    runs = [run for part in found["parts"].values() for run in part.get("runs", {}).values()]
    assert {one["not_finished"] for one in runs} == {"out of time"}


def test_every_part_of_tests_is_run():
    assert [part.name for part in measure.PARTS if not part.runs] == sorted(TEST_PARTS, key=NAMES.index)


@pytest.fixture
def run_with(monkeypatch, tmp_path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs main with a stand-in for `run_part`."""
    for name in ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"):  # put back at the end
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("OUT", str(tmp_path))

    def call(run_part: Callable[..., None], *options: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(measure, "run_part", run_part)
        monkeypatch.setattr(sys, "argv", ["measure", "--toy", *options])
        try:
            status = measure.main()
        except KeyboardInterrupt:
            status = -1
        return status, json.loads((tmp_path / "gpu.json").read_text())

    return call


def test_a_run_that_is_cut_short_has_written_what_it_found(run_with):
    def run_part(part: measure.Part, is_toy: bool, seconds: float, result: dict[str, Any], save: Any) -> None:
        if part.name == NAMES[2]:
            raise KeyboardInterrupt
        result["passed"] = 3

    status, found = run_with(run_part)
    assert (status, found["not_finished"]) == (-1, NAMES[2:])
    assert {name: part["passed"] for name, part in found["parts"].items()} == dict.fromkeys(NAMES[:2], 3)


@pytest.mark.parametrize("result", [{"failed": {"test": "reason"}}, {"not_finished": "out of time"}], ids=str)
def test_the_status_says_that_a_test_failed_or_a_part_did_not_finish(run_with, result):
    assert run_with(lambda part, is_toy, seconds, found, save: found.update(result))[0] == 1
    assert run_with(lambda part, is_toy, seconds, found, save: found.update(failed={}))[0] == 0


def test_a_slow_part_takes_nothing_from_those_after_it_and_a_fast_one_leaves_them_its_time(monkeypatch, run_with):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(measure, "time", clock)

    def given(use: float) -> list[float]:
        seconds_of: list[float] = []

        def run_part(part: measure.Part, is_toy: bool, seconds: float, result: dict[str, Any], save: Any) -> None:
            seconds_of.append(seconds)
            clock.now += use * seconds

        run_with(run_part, "--seconds", "500")
        return seconds_of

    total = sum(part.share for part in measure.PARTS)
    shares = [500 * part.share / total for part in measure.PARTS]
    assert given(1.0) == pytest.approx(shares)
    left = given(0.5)
    assert left[0] == pytest.approx(shares[0])
    assert all(more > share for more, share in zip(left[1:], shares[1:]))


def test_two_results_are_compared_line_by_line():
    def result(failed: list[str], **runs: Any) -> dict[str, Any]:
        return {"parts": {"head": {"failed": dict.fromkeys(failed, "")}, "users": {"runs": runs}}}

    before = result(["old"], packed={"seconds": 2.0, "peak_mib": 100})
    after = result(["new"], packed={"seconds": 1.0, "peak_mib": 150}, padded={"not_finished": "out of time"})
    assert list(measure.compare(before, after)) == [
        "no longer fails: old",
        "fails now: new",
        "packed: 1.000 s, 0.50 times before; memory 1.50 times",
        "padded: out of time",
    ]


@pytest.mark.parametrize(("visible", "left"), [(None, "0"), ("2,3", "2"), ("GPU-5ebe9f43", "GPU-5ebe9f43")])
def test_one_device_of_several_is_left(monkeypatch, visible, left):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")  # put back at the end
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    measure.one_device()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
