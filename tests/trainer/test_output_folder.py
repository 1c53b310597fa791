"""Two trainings in one output folder, and folders that cannot be written to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_ext.errors import CheckpointError
from grpo_ext.run import output_folder
from grpo_ext.run.checkpoint import checkpoints, why_broken
from grpo_ext.run.log import LOG, read_log
from grpo_ext.run.output_folder import HeldFolder
from tests.support.trainers import SAVE, make, on


def test_a_run_that_starts_beside_another_saves_elsewhere(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(output_folder, "_PATIENCE", 0.0)
    folder, refusals = tmp_path / "out", []
    first, second = make(folder, **SAVE), make(folder, **SAVE)

    def resume_too(state: Any) -> None:
        with pytest.raises(CheckpointError) as refused:
            make(folder, **SAVE).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        refusals.append(str(refused.value))

    first.add_callback(on("on_step_end", lambda state: second.train(), at=1))  # before the first has saved anything
    first.add_callback(on("on_step_end", resume_too, at=3))
    first.train()
    for trainer, name in ((first, "out"), (second, "out-2")):
        assert Path(str(trainer.args.output_dir)) == tmp_path / name
        assert [why_broken(path) for path in checkpoints(tmp_path / name)] == [None] * 3
        assert read_log(tmp_path / name / LOG).starts[-1]["ended"] == "finished"
    assert "out belongs to another run, which" in caplog.text
    assert "two runs would overwrite each other's checkpoints" in refusals[0]
    make(folder, **SAVE).train(resume_from_checkpoint=str(folder / "checkpoint-2"))  # free again


def test_a_resume_that_was_refused_changes_no_folder(tmp_path):
    folder = tmp_path / "out"
    make(folder, **SAVE).train()
    trainer = make(folder, **SAVE)
    with pytest.raises(CheckpointError, match="nope does not exist"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nope"))
    assert Path(str(trainer.args.output_dir)) == folder
    trainer.train(resume_from_checkpoint="latest")
    assert trainer.state.global_step == 3


def test_latest_is_looked_for_once_the_folder_is_free(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    first = make(folder, **SAVE)
    first.train()
    second, release = make(folder, **SAVE), HeldFolder.take

    def take(held: HeldFolder, name: str, in_place: bool) -> tuple[str, str]:
        (tmp_path / "checkpoint-3").rename(folder / "checkpoint-3")  # the other run saves it, and ends
        return release(held, name, in_place)

    (folder / "checkpoint-3").rename(tmp_path / "checkpoint-3")
    monkeypatch.setattr(HeldFolder, "take", take)
    second.train(resume_from_checkpoint="latest")
    assert second.state.global_step == 3
    assert (folder / "checkpoint-3").is_dir()
    assert not list(folder.glob("*.replaced-*"))
