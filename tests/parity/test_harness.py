"""The negative controls of the harness: every part of a run that is another is found to be another."""

import copy

import pytest
import torch

from tests.parity.harness import Run, compare, difference, three_runs
from tests.parity.scripts import parts_of
from tests.support.tiny import stock_scores

pytestmark = stock_scores


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Run]:
    return three_runs(tmp_path_factory.mktemp("runs"), parts_of, steps_per_generation=2)


CHANGES = {
    "outputs 0 (train) completion_ids": lambda run: run.outputs[0][1]["completion_ids"].add_(1),
    "rows 0 (train) [2]['answer']": lambda run: run.rows[0][1][2].update(answer="?"),
    "metrics 0 (train) anything: TRL has none": lambda run: run.metrics[0][1].update(anything=[0.0]),
    "metrics 0 (train) reward: 1 entries against 2": lambda run: run.metrics[0][1]["reward"].append(0.0),
    "tables 0 (train) completion[0]": lambda run: run.tables[0][1]["completion"].__setitem__(0, "another"),
    "update: relative error": lambda run: run.update.mul_(1.001),
    "lines 0 (train) loss": lambda run: run.lines[0][1].update(loss=1e3),
    "timings transformers.generate: missing": lambda run: run.timings.clear(),
    "journal reward: 1 entries against 2": lambda run: run.journal.append(run.journal[0]),
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_change_is_found(runs, line):
    stock, scored, _ = runs
    assert compare(stock, scored) == []
    other = copy.deepcopy(scored)
    CHANGES[line](other)
    assert any(found.startswith(line) for found in compare(stock, other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.tensor([0.0, float("nan")]), torch.tensor([0.0, 0.0])),
        (float("nan"), 0.0),
        ([1], [True, 2]),
    ],
)
def test_values_that_differ_are_told_apart(one, other):
    assert difference(one, other) is not None
    assert difference(one, copy.deepcopy(one)) is None
