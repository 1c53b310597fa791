"""TRL's table of completions is written whatever is in it, and never ends the training."""

import datetime
import shutil
from typing import Any

import pyarrow.parquet as parquet
import pytest

from tests.support.trainers import SAVE, make, on

SHARED: list[Any] = []
SHARED.append(SHARED)
# of four completions, by what is odd about them
ODD: dict[str, list[Any]] = {
    "types": [1, "a", None, [2]],
    "digits": [10**30, 1, 2, 3],
    "empty": [{}, {}, {}, {}],
    "nested": [{"a": [1, "x"]}, {"a": {"b": 2}}, {"a": None}, {}],
    "keys": [{(1, 2): 3}, {1: 2}, {"1": 2}, None],
    "surrogate": ["\ud83d", "b", "ü", None],
    "circle": [SHARED, [], [1], None],
    "objects": [datetime.timedelta(1), object(), print, {1, 2}],
}
PLAIN = {"number": [1, 2.5, None, 3], "text": ["a", "b", None, "ü"], "lists": [[1], [], [2, 3], None]}


def table(folder: Any, step: int) -> Any:
    return parquet.read_table(folder / "completions" / f"completions_{step:05d}.parquet").to_pydict()


@pytest.mark.parametrize("resumes", [False, True])
def test_odd_cells_become_text_and_others_stay_as_they_are(tmp_path, resumes):
    def reward(completions, log_extra, log_metric, **kwargs):
        for name, column in (ODD | PLAIN).items():
            log_extra(name, column)
        log_extra(7, ["named by a number"] * 4)
        log_metric(7, 1.0)
        return [float(len(text)) for text in completions]

    parts = {"reward": reward, "log_completions": True, "rollout_chunk_size": 4, **SAVE}
    make(tmp_path, **parts, max_steps=2).train()
    if resumes:
        shutil.rmtree(tmp_path / "completions")
        make(tmp_path, **parts, max_steps=2).train(str(tmp_path / "checkpoint-1"))
    written = table(tmp_path, 2)
    assert written["7"] == ["named by a number"] * 16
    for name in ODD:
        assert all(cell is None or isinstance(cell, str) for cell in written[name]), name
    assert written["types"][:4] == ["1", "a", None, "[2]"]
    assert written["surrogate"][:4] == ["\\ud83d", "b", "ü", None]
    assert {name: written[name][:4] for name in PLAIN} == PLAIN


def test_a_table_that_cannot_be_written_is_a_warning_and_an_error_of_a_callback_is_one(tmp_path, caplog):
    callback = on("on_train_begin", lambda state: shutil.rmtree(tmp_path / "completions"))
    trainer = make(tmp_path, log_completions=True, max_steps=3, callbacks=[callback])
    trainer.train()
    assert not (tmp_path / "completions").exists()
    assert caplog.text.count("The table of completions was not written") == 1
    assert trainer.state.global_step == 3

    def fail(state: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        make(tmp_path, log_completions=True, max_steps=1, callbacks=[on("on_log", fail)]).train()
