"""The server that forks the tests' launches: what comes out is what fresh interpreters and the real launcher give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from accelerate.utils.other import get_free_port

from grpo_ext.tools.check import runs
from tests.support.cases import Bench
from tests.support.forks import SERVED, run_forked, serves
from tests.support.launches import run_all

pytestmark = pytest.mark.skipif(not serves({**os.environ, **SERVED}), reason="launches are not forked here")


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("forks"))


def script(folder, text):
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_forked_run_has_the_bits_of_a_launched_one(bench, processes):
    ours = [bench.run(name, 5, trace=True, max_steps=2) for name in ("kl", "moe")]
    for one, other in zip(run_all(ours, processes), runs.train(ours, processes), strict=True):
        assert one.error is None
        assert one.trace == other.trace
        assert one.log[0]["reward"] == other.log[0]["reward"]
        assert all(torch.equal(one.delta[name], other.delta[name]) for name in other.delta)


SAY = """
import json, os, sys
known = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "ACCELERATE_", "OMP_", "HF_", "PYTHONW", "TOKENIZERS")
said = {name: value for name, value in os.environ.items() if name.startswith(known)}
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump([said, __name__, sys.argv[1:]], file)
"""


def test_processes_are_told_what_the_launcher_tells_them(tmp_path):
    seen = []
    here = {**os.environ, **SERVED}
    for way in ("launched", "forked"):
        (tmp_path / way).mkdir()
        arguments = [script(tmp_path, SAY), str(tmp_path / way)]
        if way == "forked":
            assert run_forked(arguments, 2, here, 60)[0] == 0
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            torchrun += ["--master-port", str(get_free_port()), *arguments]
            subprocess.run(torchrun, env=here, check=True, capture_output=True)
        seen.append([json.loads((tmp_path / way / f"{rank}.json").read_text()) for rank in (0, 1)])
    for (one, *rest), (other, *others) in zip(*seen):
        assert one.keys() == other.keys()
        assert {name for name in one if one[name] != other[name]} <= {"MASTER_PORT"}
        assert (rest[0], rest[1][0]) == (others[0], others[1][0].replace("forked", "launched"))


def test_a_process_that_dies_ends_the_others(tmp_path):
    text = (
        "import os, sys, time\nprint(os.getpid(), flush=True)\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n"
    )
    start = time.perf_counter()
    here = {**os.environ, **SERVED}
    status, output = run_forked([script(tmp_path, text + "time.sleep(100)")], 2, here, 60)
    assert time.perf_counter() - start < 20
    assert status == 1
    assert "process 1 ended with status -9" in output
    assert all(ended(int(pid)) for pid in output.split()[:2])
