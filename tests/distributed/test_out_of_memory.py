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

# the forwards of two steps on a process that runs four micro-batches in each
AT = {1: True, 2: False, 3: False, 4: False, 5: False, 6: True, 7: False, 8: False}  # whether `make test` takes it
BITWISE_AT = {1: False, 2: True, 4: False}
MODES: dict[str, tuple[dict[str, Any], dict[int, bool]]] = {
    "default": ({}, AT),
    "bitwise": ({"bitwise_invariant": True}, BITWISE_AT),
}


def moments(known: dict[int, bool]) -> list:
    return [at if always else pytest.param(at, marks=pytest.mark.full) for at, always in known.items()]


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> dict[str, RunResult]:
    bench = Bench(tmp_path_factory.mktemp("memory"))
    runs = []
    full = request.config.getoption("--full")
    for mode, (settings, known) in MODES.items():
        run = bench.run("grpo", 2, name=f"{mode}-whole", trace=True, max_steps=3, **settings)
        runs.append(run)
        for at in [at for at, always in known.items() if always or full]:
            again = dataclasses.replace(run, name=f"{mode}-{at}", rewards=(out_of_memory(at, rank=1),))
            runs.append(again)
    return {result.name: result for result in run_all(runs, processes=2)}


@pytest.mark.parametrize("at", moments(AT))
def test_the_update_is_the_same(results, at):
    whole, again = results["default-whole"], results[f"default-{at}"]
    assert again.error is None, again.error
    assert 0 < update_error(whole.delta, again.delta) <= UPDATE  # other micro-batches: not the same bits


@pytest.mark.parametrize("at", moments(BITWISE_AT))
def test_in_bitwise_mode_the_bits_are_the_same(results, at):
    whole, again = results["bitwise-whole"], results[f"bitwise-{at}"]
    assert again.error is None, again.error
    assert len(again.trace) == 3
    assert again.trace == whole.trace
