"""Plots say what was measured: every split is drawn, with its error; refusals are marked."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from grpo_ext.errors import ConfigError
from grpo_ext.tools.check.report import CheckReport, Split, SplitResult
from grpo_ext.tools.plots import figure_class, write_check_plot, write_held_out_plot
from grpo_ext.tools.stock import OURS, STOCK

SPLITS = [Split(32, 1), Split(5, 1), Split(16, 2)]
ERRORS = {OURS: [0.0, 4.7e-6, 5.9e-6], STOCK: [0.0, math.nan, 0.82]}


@pytest.fixture
def report() -> CheckReport:
    results = [
        SplitResult(
            split, trainer, error, 0.0, "", "refused" if math.isnan(error) else "same" if error else "reference"
        )
        for trainer in (OURS, STOCK)
        for split, error in zip(SPLITS, ERRORS[trainer])
    ]
    return CheckReport(results, steps=5)


@pytest.fixture
def figures(monkeypatch):
    """The figures that were written."""
    written, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *how, **more: written.append(self) or save(self, *how, **more))
    return written


def test_every_split_is_drawn_where_it_was_measured(report, tmp_path, figures):
    write_check_plot(report, 1e-5, tmp_path / "check.svg")
    (axis,) = figures[0].axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}
    assert drawn["grpo_ext"] == [[0, 4.7e-6], [1, 5.9e-6]]
    assert drawn["stock TRL"] == [[1, 0.82]]
    assert [x for x, _ in drawn["stock TRL: refused"]] == [0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1 x 5", "2 x 16"]
    text = (tmp_path / "check.svg").read_text()
    for words in ("1 x 5", "stock TRL", "tolerance 1e-05", "relative update error, 5 steps"):
        assert f"<!-- {words} -->" in text


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'grpo-ext\[plot\]'"):
        figure_class(Path("plot.svg"))


def test_a_file_that_cannot_be_written_is_refused():
    with pytest.raises(ConfigError, match=r"plot.xyz is no plot .* \.png, \.svg or \.pdf"):
        figure_class(Path("plot.xyz"))


def test_held_out_scores_are_drawn_over_the_seconds_of_training(tmp_path, figures):
    for name in ("ours", "stock", "own"):
        (tmp_path / name).mkdir()
    scores = {"exact_match_by_step": {"0": 0.25, "5": 0.5}, "seconds_by_step": {"0": 0.0, "5": 60.0}}
    for name in ("ours", "stock"):
        (tmp_path / name / "metrics.json").write_text(json.dumps(scores))
    write_held_out_plot([tmp_path / "ours", tmp_path / "stock"], tmp_path / "race.svg")
    (axis,) = figures[0].axes
    assert [line.get_label() for line in axis.get_lines()] == ["ours", "stock"]
    assert axis.get_lines()[0].get_xydata().tolist() == [[0.0, 0.25], [60.0, 0.5]]
    for broken in ("{}", '{"exact_'):
        (tmp_path / "own" / "metrics.json").write_text(broken)
        with pytest.raises(ConfigError, match="holds no held-out scores"):
            write_held_out_plot([tmp_path / "own"], tmp_path / "own.svg")
