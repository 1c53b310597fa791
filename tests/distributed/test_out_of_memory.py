"""One of two processes runs out of memory at some forward: both start the window again, and learn the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from grpo_ext.tools.check.comparison import update_error
from grpo_ext.tools.check.runs import RunResult
from tests.support.cases import Bench
from tests.support.kills import out_of_memory
from tests.support.launches import run_all
from tests.tolerances import UPDATE

AT = tuple(range(1, 9))  # the forwards of two steps on a process that runs four micro-batches in each
MODES: dict[str, dict[str, Any]] = {"default": {}, "bitwise": {"bitwise_invariant": True}}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, RunResult]:
    bench = Bench(tmp_path_factory.mktemp("memory"))
    runs = []
    for mode, settings in MODES.items():
        run = bench.run("grpo", 2, name=f"{mode}-whole", trace=True, max_steps=3, **settings)
        runs.append(run)
        for at in AT if mode == "default" else (1, 2, 4):
            again = dataclasses.replace(run, name=f"{mode}-{at}", rewards=(out_of_memory(at, rank=1),))
            runs.append(again)
    return {result.name: result for result in run_all(runs, processes=2)}


@pytest.mark.parametrize("at", AT)
def test_the_update_is_the_same(results, at):
    whole, again = results["default-whole"], results[f"default-{at}"]
    assert again.error is None, again.error
    assert 0 < update_error(whole.delta, again.delta) <= UPDATE  # other micro-batches: not the same bits


@pytest.mark.parametrize("at", [1, 2, 4])
def test_in_bitwise_mode_the_bits_are_the_same(results, at):
    whole, again = results["bitwise-whole"], results[f"bitwise-{at}"]
    assert again.error is None, again.error
    assert len(again.trace) == 3
    assert again.trace == whole.trace
