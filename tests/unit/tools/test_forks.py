"""The server that forks the tests' launches: what comes out is what fresh interpreters and the real launcher give."""

from __future__ import annotations

import os

import pytest
import torch

from grpo_ext.tools.check import runs
from tests.support.cases import Bench
from tests.support.forks import SERVED, serves
from tests.support.launches import run_all

pytestmark = pytest.mark.skipif(not serves({**os.environ, **SERVED}), reason="launches are not forked here")


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("forks"))


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_forked_run_has_the_bits_of_a_launched_one(bench, processes):
    ours = [bench.run(name, 5, trace=True, max_steps=2) for name in ("kl", "moe")]
    for one, other in zip(run_all(ours, processes), runs.train(ours, processes), strict=True):
        assert one.error is None
        assert one.trace == other.trace
        assert one.log[0]["reward"] == other.log[0]["reward"]
        assert all(torch.equal(one.delta[name], other.delta[name]) for name in other.delta)
