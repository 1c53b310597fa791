"""The negative controls of the harness: every part of a run that is another is found to be another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.parity.harness import KNOWN, Run, Sides, compare, difference, side_by_side
from tests.parity.scripts import Journal, scripted_model, writing_reward
from tests.support.tiny import prompts, stock_scores, tiny_tokenizer

pytestmark = stock_scores


@pytest.fixture(scope="module")
def sides(tmp_path_factory) -> Sides:
    def parts(journal: Journal) -> dict[str, Any]:
        tokenizer = tiny_tokenizer()
        names = {"model": scripted_model(tokenizer), "processing_class": tokenizer, "train_dataset": prompts(2)}
        return {**names, "reward_funcs": writing_reward(journal)}

    return side_by_side(tmp_path_factory.mktemp("sides"), parts, steps_per_generation=2)


def change_token(run: Run) -> None:
    run.outputs[0][1]["completion_ids"][3, 1] += 1


def change_advantage(run: Run) -> None:
    run.outputs[0][1]["advantages"][5] += 1e-3


def drop_field(run: Run) -> None:
    del run.outputs[0][1]["old_per_token_logps"]


def change_row(run: Run) -> None:
    run.rows[0][1][2]["answer"] = "?"


def change_metric(run: Run) -> None:
    run.metrics[0][1]["reward_std"][0] *= 1.001


def add_metric(run: Run) -> None:
    run.metrics[0][1]["anything"] = [0.0]


def log_twice(run: Run) -> None:
    run.metrics[0][1]["reward"].append(run.metrics[0][1]["reward"][0])


def change_table(run: Run) -> None:
    run.tables[0][1]["completion"][0] += "a"


def change_order(run: Run) -> None:
    run.tables[0][1]["rewards"]["writing"].reverse()


def change_loss(run: Run) -> None:
    run.lines[0][1]["loss"] += 1e-3


def forget_timing(run: Run) -> None:
    run.timings = [name for name in run.timings if name != "transformers.generate"]


def forget_column(run: Run) -> None:
    del run.journal[0][1][3]["answer"]


def call_twice(run: Run) -> None:
    run.journal.append(run.journal[0])


def log_less(run: Run) -> None:
    run.lines.pop()


CHANGES = {
    "outputs 0 (train) completion_ids": change_token,
    "outputs 0 (train) advantages": change_advantage,
    "outputs 0 (train) old_per_token_logps: missing": drop_field,
    "rows 0 (train) [2]['answer']": change_row,
    "metrics 0 (train) reward_std[0]": change_metric,
    "metrics 0 (train) anything: TRL has none": add_metric,
    "metrics 0 (train) reward: 1 entries against 2": log_twice,
    "tables 0 (train) completion[0]": change_table,
    "tables 0 (train) rewards['writing'][0]": change_order,
    "lines 0 (train) loss": change_loss,
    "timings transformers.generate: missing": forget_timing,
    "journal reward[0][3]: keys": forget_column,
    "journal reward: 1 entries against 2": call_twice,
    "lines: ['train', 'train'] against ['train']": log_less,
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_change_is_found(sides, line):
    assert compare(sides.stock, sides.scored) == []
    other = copy.deepcopy(sides.scored)
    CHANGES[line](other)
    assert any(found.startswith(line) for found in compare(sides.stock, other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.long)),
        (torch.tensor([0.0, float("nan")]), torch.tensor([0.0, 0.0])),
        (float("nan"), 0.0),
        (None, 0),
        ([1], [True, 2]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ("a", "b"),
    ],
)
def test_values_that_differ_are_told_apart(one, other):
    assert difference(one, other) is not None
    assert difference(one, copy.deepcopy(one)) is None


def test_an_error_on_one_side_alone_is_found(sides):
    failed = copy.deepcopy(sides.scored)
    failed.error = ValueError("no")
    assert compare(sides.stock, failed)[0].startswith("error: None against ValueError")


def test_every_known_difference_has_a_reason_and_is_named_once():
    assert all(known.reason for known in KNOWN)
    names = [(known.part, known.name, known.extra) for known in KNOWN]
    assert len(set(names)) == len(names)
