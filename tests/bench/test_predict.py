"""`make predict` at toy size, and its statistics on rows that are known."""

import json
import math
from pathlib import Path

import pytest

from grpo_ext.demo import EMBEDDED
from grpo_ext.demo.task import Demo, DemoTask, demo_config_defaults, demo_named
from tests.bench import predict
from tests.support.tiny import letter_reward, prompts, tiny_model, tiny_tokenizer


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


def test_the_table_has_the_medians_of_seeds_and_every_correlation():
    several = [{**row, "case": f"epsilon={row['update']}"} for row in rows((0, 1, 4), (1, 1, 6), (2, 1, 9), (0, 2, 8))]
    lines = predict.as_text(several, {"update and weights": [0.5, -0.25, 1.0]}).splitlines()
    assert lines[0] == "| case (medians of 3 seeds) | update | gradient | weights | score |"
    assert lines[2:] == [
        "| `epsilon=1` | 1 | 1 | 6 | -6 |",
        "| `epsilon=2` | 2 | 2 | 8 | -8 |",
        "update and weights: rank correlation 0.50 (-0.25 to 1.00)",
    ]


def toy(folder: Path) -> Demo:
    """A demo of small steps with a random model."""
    for part in (tiny_model(), tiny_tokenizer()):
        part.save_pretrained(folder)
    data = {"train_dataset": prompts(), "eval_dataset": prompts(8, seed=1)}
    sizes = {"global_batch_size": 8, "per_device_train_batch_size": 8, "num_generations": 4}
    settings = {**demo_config_defaults(), **sizes}
    return Demo(lambda model: DemoTask("a toy", folder, reward_funcs=[letter_reward], **data), settings)


@pytest.mark.parametrize("demo", [toy, lambda folder: demo_named(EMBEDDED)])
@pytest.mark.full
def test_the_study_runs(demo, tmp_path, monkeypatch, capsys):
    cases = [{"epsilon": 0.02}, {"learning_rate": 1e-3}, {"scale_rewards": "none"}]
    monkeypatch.setattr(predict, "DEMO_CASES", cases)
    monkeypatch.setattr(predict, "demo_named", lambda name: demo(tmp_path / "model"))
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
