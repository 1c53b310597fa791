"""The README's figures show what was measured: every split with its error, refusals marked."""

from __future__ import annotations

import json
import math

import pytest
from matplotlib.figure import Figure

from grpo_ext.tools.check.report import CheckReport, Split, SplitResult
from grpo_ext.tools.stock import OURS, STOCK
from tests.bench.figures import write_check_plot, write_held_out_plot

SPLITS = [Split(32, 1), Split(5, 1), Split(16, 2)]
ERRORS = {OURS: [0.0, 4.7e-6, 5.9e-6], STOCK: [0.0, math.nan, 0.82]}


@pytest.fixture
def figures(monkeypatch):
    """The figures that were written."""
    written, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *how, **more: written.append(self) or save(self, *how, **more))
    return written


def test_every_split_is_drawn_where_it_was_measured(tmp_path, figures):
    results = [
        SplitResult(split, trainer, "refused" if math.isnan(error) else "same" if error else "reference", "", error)
        for trainer in (OURS, STOCK)
        for split, error in zip(SPLITS, ERRORS[trainer])
    ]
    write_check_plot(CheckReport(results, steps=5).as_dict(), tmp_path / "check.svg")
    (axis,) = figures[0].axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}
    assert drawn["grpo_ext"] == [[0, 4.7e-6], [1, 5.9e-6]]
    assert drawn["stock TRL"] == [[1, 0.82]]
    assert [x for x, _ in drawn["stock TRL: refused"]] == [0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1 x 5", "2 x 16"]
    assert "<!-- relative update error, 5 steps -->" in (tmp_path / "check.svg").read_text()


def test_held_out_scores_are_drawn_over_the_seconds_of_training(tmp_path, figures):
    scores = {"exact_match_by_step": {"0": 0.25, "5": 0.5}, "seconds_by_step": {"0": 0.0, "5": 60.0}}
    for name in ("ours", "stock"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").write_text(json.dumps(scores))
    write_held_out_plot([tmp_path / "ours", tmp_path / "stock"], tmp_path / "race.svg")
    (axis,) = figures[0].axes
    assert [line.get_label() for line in axis.get_lines()] == ["ours", "stock"]
    assert axis.get_lines()[0].get_xydata().tolist() == [[0.0, 0.25], [60.0, 0.5]]
