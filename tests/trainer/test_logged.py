"""What is logged: trackers, offline and for real; the run log of real runs; TRL's table of completions.

The table is written whatever is in it, and never ends the training.
"""

import datetime
import json
import shutil
from typing import Any

import pyarrow.parquet as parquet
import pytest

from grpo_ext.run.record import read_record, tables_of
from grpo_ext.tools.report import ReportCallback, load_run
from grpo_ext.tools.samples import rollouts_of
from tests.support.images import image_model, image_processor, image_rows, picture_reward
from tests.support.tiny import prompts, tiny_model
from tests.support.tool_runs import always_calling
from tests.support.trainers import SAVE, log_of, make, on, ran


def train(folder, **settings):
    return ran(make(folder, train_dataset=prompts(22), eval_dataset=prompts(4, seed=1), **settings))


@pytest.mark.full
def test_tensorboard_gets_the_metrics(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    more = {"eval_strategy": "steps", "eval_steps": 1, "eval_pass_threshold": 0.0, "beta": 0.1, "max_steps": 2}
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


SHARED: list[Any] = []
SHARED.append(SHARED)
DEEP: list[Any] = []
for _ in range(10**4):  # deeper than Python's stack
    DEEP = [DEEP]
# of four completions, by what is odd about them
ODD: dict[str, list[Any]] = {
    "types": [1, "a", None, [2]],
    "digits": [10**30, 1, 2, 3],
    "empty": [{}, {}, {}, {}],
    "nested": [{"a": [1, "x"]}, {"a": {"b": 2}}, {"a": None}, {}],
    "keys": [{(1, 2): 3}, {1: 2}, {"1": 2}, None],
    "surrogate": ["\ud83d", "b", "ü", None],
    "circle": [SHARED, [], [1], None],
    "deep": [DEEP, [], [1], None],
    "objects": [datetime.timedelta(1), object(), print, {1, 2}],
}
PLAIN = {"number": [1, 2.5, None, 3], "text": ["a", "b", None, "ü"], "lists": [[1], [], [2, 3], None]}


def table(folder: Any, step: int, evaluation: str = "") -> Any:
    return parquet.read_table(folder / "completions" / f"completions_{step:05d}{evaluation}.parquet").to_pydict()


def test_odd_cells_become_text_and_others_stay_as_they_are(tmp_path):
    def reward(completions, log_extra, log_metric, **kwargs):
        for name, column in (ODD | PLAIN).items():
            log_extra(name, column)
        log_extra(7, ["named by a number"] * 4)
        log_metric(7, 1.0)
        return [float(len(text)) for text in completions]

    parts = {"reward": reward, "log_completions": True, "rollout_chunk_size": 4, **SAVE}
    make(tmp_path, **parts, max_steps=2).train()
    written = table(tmp_path, 2)
    assert written["7"] == ["named by a number"] * 16
    for name in ODD:
        assert all(cell is None or isinstance(cell, str) for cell in written[name]), name
    assert written["types"][:4] == ["1", "a", None, "[2]"]
    assert written["surrogate"][:4] == ["\\ud83d", "b", "ü", None]
    assert {name: written[name][:4] for name in PLAIN} == PLAIN
    for name in ("completions", "checkpoint-2"):
        shutil.rmtree(tmp_path / name)
    make(tmp_path, **parts, max_steps=2).train(str(tmp_path / "checkpoint-1"))
    assert repr(table(tmp_path, 2)) == repr(written)  # cells that are not a number equal themselves there


def test_a_table_that_cannot_be_written_is_a_warning_and_an_error_of_a_callback_is_one(tmp_path, caplog):
    callback = on("on_train_begin", lambda state: shutil.rmtree(tmp_path / "completions"))
    trainer = ran(make(tmp_path, log_completions=True, max_steps=3, callbacks=[callback]))
    assert not (tmp_path / "completions").exists()
    assert caplog.text.count("The table of completions was not written") == 1
    assert "(OSError in pandas." in caplog.text
    assert trainer.state.global_step == 3

    def fail(state: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        make(tmp_path, log_completions=True, max_steps=1, callbacks=[on("on_log", fail)]).train()


@pytest.mark.full
def test_a_log_and_evaluations_at_one_step_write_a_table_each(tmp_path):
    sets = {name: prompts(4, seed=seed) for seed, name in enumerate(("a", "b/c"), start=1)}
    settings = {"log_completions": True, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    ran(make(tmp_path / "alone", train_dataset=prompts(22), log_completions=True, max_steps=2))
    ran(make(tmp_path / "run", train_dataset=prompts(22), eval_dataset=sets, **settings))
    for step in (1, 2):
        assert table(tmp_path / "run", step)["completion"] == table(tmp_path / "alone", step)["completion"]
        for name, evaluation in zip(sets, ("_eval_a", "_eval_b_c"), strict=True):
            written = table(tmp_path / "run", step, evaluation)
            assert set(sets[name]["prompt"]) <= set(written["prompt"]), name
            assert set(written["step"]) == {step}
    names = sorted(path.name for path in (tmp_path / "run" / "completions").iterdir())
    assert len(names) == 6
    record = read_record(tmp_path / "run", trail=False)
    assert sorted(rollouts_of(tables_of(tmp_path / "run", record))) == [1, 2]


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """Tables that wandb was sent, as rows of columns; offline."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    sent: list[dict[str, list[Any]]] = []

    class Shown(wandb.Table):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            if "advantage" in self.columns:
                sent.append({name: [row[place] for row in self.data] for place, name in enumerate(self.columns)})

    monkeypatch.setattr(wandb, "Table", Shown)
    yield sent
    wandb.finish()


@pytest.mark.full
def test_wandb_gets_the_table_of_conversations_with_tools(tmp_path, tracked, caplog):
    calls = always_calling() | {"report_to": "wandb", "log_completions": True, "max_steps": 1}
    model = tiny_model(max_position_embeddings=4096)
    ran(make(tmp_path / "run", model, **calls))
    assert "was not written" not in caplog.text
    assert table(tmp_path / "run", 1)["completion"] == tracked[0]["completion"]
    messages = [json.loads(cell) for cell in tracked[0]["completion"]]
    assert {message["role"] for row in messages for message in row} == {"assistant", "tool"}


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.full
def test_wandb_gets_the_table_of_prompts_with_images(tmp_path, tracked, caplog, shown):
    parts = {"reward": picture_reward, "train_dataset": image_rows(8, (1, 0, 2)), "rollout_chunk_size": 8}
    settings = {"report_to": "wandb", "log_completions": True, "log_multimodal": shown, "max_steps": 1}
    processor = image_processor("llava")
    ran(make(tmp_path / "run", image_model("llava"), processing_class=processor, **parts, **settings))
    assert "was not written" not in caplog.text
    sent = tracked[0]
    assert ("image" in sent) is shown
    prompt = json.loads(sent["prompt"][0]) if isinstance(sent["prompt"][0], str) else sent["prompt"][0]
    assert prompt[-1]["role"] == "user"
    assert "PIL" not in str(sent["prompt"])


def test_a_tracker_that_refuses_is_warned_of_once_without_a_row(tmp_path, tracked, caplog, monkeypatch):
    import wandb

    def refuse(dataframe: Any) -> None:
        raise TypeError(f"cannot show {dataframe.to_dict()}")

    monkeypatch.setattr(wandb, "Table", refuse)
    trainer = ran(make(tmp_path / "run", report_to="wandb", log_completions=True, max_steps=2))
    said = [record.getMessage() for record in caplog.records if "table of completions" in record.getMessage()]
    assert len(said) == 1
    assert "cannot show" not in said[0]
    assert f"(TypeError in {__name__})" in said[0]
    assert len(table(tmp_path / "run", 2)["prompt"]) == 16
    assert trainer.state.global_step == 2
