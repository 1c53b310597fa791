"""One of two processes runs out of memory at some forward: both start the step again, and learn the same."""

from typing import Any

import pytest

from grpo_ext.tools.check.comparison import update_error
from grpo_ext.tools.check.runs import Run
from tests.support.cases import Bench
from tests.support.kills import out_of_memory
from tests.support.launches import Trained, run_all
from tests.tolerances import UPDATE

MODES: dict[str, dict[str, Any]] = {"default": {}, "bitwise": {"bitwise_invariant": True}}
# forwards of a process that runs four in each step: the first and the last of a step, and one of the next step
CASES = [("default", 1), ("default", 4), ("default", 6), ("bitwise", 2)]
FULL = (("default", 1), ("default", 4))  # with --full alone


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> dict[str, Trained]:
    bench = Bench(tmp_path_factory.mktemp("memory"))

    def run(mode: str, name: str, **changes: Any) -> Run:
        return bench.run("grpo", 2, name=name, trace=True, max_steps=3, **MODES[mode], **changes)

    runs = [run(mode, mode) for mode in MODES]
    cases = [case for case in CASES if case not in FULL or request.config.getoption("--full")]
    runs += [run(mode, f"{mode}-{at}", rewards=(out_of_memory(at, rank=1),)) for mode, at in cases]
    return {result.name: result for result in run_all(runs, processes=2)}


@pytest.mark.parametrize(
    ("mode", "at"), [pytest.param(*case, marks=[pytest.mark.full] if case in FULL else []) for case in CASES]
)
def test_the_update_is_the_same(results, mode, at):
    whole, again = results[mode], results[f"{mode}-{at}"]
    assert again.error is None, again.error
    assert len(again.trace) == 3
    if mode == "bitwise":
        assert again.trace == whole.trace
    else:  # other micro-batches: not the same bits
        assert 0 < update_error(whole.delta, again.delta) <= UPDATE
