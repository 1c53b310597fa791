"""`make test-gpu` beyond its tests: what it writes, when, and within which time."""

import json
import os
import subprocess
import sys

import pytest

from grpo_ext.tools.stock import OURS
from tests.gpu import measure
from tests.support.gpu import TEST_PARTS


@pytest.mark.full
def test_a_rehearsal_runs_every_part(tmp_path):
    file = tmp_path / "gpu.json"
    # three times what a GPU gets: a part has its share of it, also on a machine that does other work
    command = [sys.executable, "-m", "tests.gpu.measure", "--toy", "--output", str(file), "--seconds", "3600"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = json.loads(file.read_text())
    assert (done.returncode, found["not_finished"]) == (0, [])
    assert list(found["parts"]) == [part.name for part in measure.PARTS]
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
