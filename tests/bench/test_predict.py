"""`make predict` at toy size, and its statistics on rows that are known."""

import json
import math

import pytest

from tests.bench import predict


def rows(*pairs: tuple[int, float, float]) -> list[predict.Row]:
    columns = ("seed", "update", "weights")
    return [dict(zip(columns, pair, strict=True)) | {"gradient": pair[1], "score": -pair[2]} for pair in pairs]


def test_ranks_that_agree_correlate_and_intervals_draw_whole_seeds():
    agree = rows(*((seed, float(case), case**2.0 + seed / 100) for seed in range(4) for case in range(1, 5)))
    found = predict.summary(agree, draws=50)
    assert found["update and weights"][0] > 0.9
    assert found["update and score"][0] == -found["update and weights"][0]
    opposed = [*agree[:4], *({**row, "weights": -row["weights"]} for row in agree[4:8])]
    low, high = predict.interval(opposed, "update", "weights", draws=50)
    assert (low, high) == pytest.approx((-1.0, 1.0))  # draws of the first seed alone, and of the second


def test_the_study_runs(tmp_path, monkeypatch, capsys):
    cases = [{"epsilon": 0.02}, {"learning_rate": 1e-3}, {"scale_rewards": "none"}]
    monkeypatch.setattr(predict, "DEMO_CASES", cases)
    options = ["--seeds", "1", "--steps", "2", "--at", "2", "--draws", "5", "--json", str(tmp_path / "found.json")]
    report = predict.main(options)
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["rows"] == report["rows"]
    assert [row["case"] for row in report["rows"]] == [f"{n}={v}" for case in cases for n, v in case.items()]
    clip, rate, scale = report["rows"]
    assert (clip["gradient"], clip["weights"]) == (0.0, 0.0)  # no ratio has moved that far yet
    assert rate["gradient"] == 0.0 < scale["gradient"]
    assert rate["weights"] > scale["weights"] > 0
    assert not math.isnan(report["correlations"]["update and weights"][0])
    assert "| `learning_rate=0.001` |" in capsys.readouterr().out
