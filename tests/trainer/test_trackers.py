"""Trackers, offline and for real: what the trainer logs arrives in them. And the run log of real runs."""

import pytest

from grpo_ext.tools.report import ReportCallback, load_run
from tests.support.tiny import prompts
from tests.support.trainers import log_of, make


def train(folder, resume=None, **settings):
    trainer = make(folder, train_dataset=prompts(22), eval_dataset=prompts(4, seed=1), **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_tensorboard_gets_the_metrics(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    more = {"eval_strategy": "steps", "eval_steps": 1, "eval_pass_threshold": 0.0, "beta": 0.1}
    trainer = train(tmp_path / "out", report_to="tensorboard", log_completions=True, **more)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    for name in ("reward", "layout/useful_tokens_per_second", *(f"time/{n}" for n in ("rollout", "logps", "train"))):
        assert all(value > 0 for value in log_of(trainer, name)) or name == "reward"
        found = [event.value for event in events.Scalars(f"train/{name}")]
        assert found == pytest.approx(log_of(trainer, name), rel=1e-6), name
    for name in ("pass@1", "pass@4", "mean@4"):
        found = [event.value for event in events.Scalars(f"eval/{name}")]
        assert found == pytest.approx(log_of(trainer, f"eval_{name}"), rel=1e-6), name
    assert len(list((tmp_path / "out" / "completions").glob("*.parquet"))) >= 2


def test_the_run_log_holds_every_log_line_and_those_of_evaluations(tmp_path):
    trainer = train(tmp_path / "out", callbacks=[ReportCallback()], max_steps=3, eval_strategy="steps", eval_steps=2)
    log, series = load_run(tmp_path / "out")
    for name in ("reward", "entropy", "grad_norm", "time/train", "eval_reward"):
        assert series[name][1] == log_of(trainer, name), name
    training = [entry for entry in log.entries if "reward" in entry["values"]]
    assert [entry["step"] for entry in training] == [1, 2, 3]
    assert "<td>finished</td>" in (tmp_path / "out" / "report" / "index.html").read_text()
