"""Runs that go back to an earlier checkpoint, and which of an output_dir's runs is the latest."""

import shutil
from pathlib import Path

import pytest

from grpo_ext.run.checkpoint import checkpoints, run_to_resume
from grpo_ext.run.record import read_record
from tests.support.trainers import SAVE, make, on, ran


def test_the_latest_run_is_one_that_went_back_also_before_its_first_checkpoint(tmp_path):
    run = tmp_path / "run"
    ran(make(run, **SAVE))
    fails = on("on_step_end", lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(run, **SAVE, callbacks=[fails]).train(f"{run}/checkpoint-1")
    assert not checkpoints(tmp_path / "run-2")
    trainer = make(run, **SAVE)
    trainer.train("latest")
    assert trainer.args.output_dir == f"{run}-2"
    assert [path.name for path in checkpoints(tmp_path / "run-2")] == ["checkpoint-2", "checkpoint-3"]
    assert read_record(tmp_path / "run-2").trained == [1, 2, 3]
    shutil.copytree(tmp_path / "run-2", tmp_path / "run-7")  # a copy does not belong to this output_dir
    assert run_to_resume("latest", run) == tmp_path / "run-2"


def test_a_run_that_goes_back_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    ran(make(Path("."), **SAVE))
    trainer = ran(make(Path("."), **SAVE), "checkpoint-1")
    assert Path(trainer.args.output_dir).samefile(tmp_path / "run-2")
    assert run_to_resume("latest", ".") == tmp_path / "run-2"
