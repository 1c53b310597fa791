"""The folder of a run: taken by one run at a time, and a sentence where it cannot be written to."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from filelock import FileLock

from grpo_ext.errors import ConfigError
from grpo_ext.run import checkpoint
from grpo_ext.run.checkpoint import take_folder


def test_runs_that_start_at_once_take_folders_of_their_own(tmp_path):
    together = threading.Barrier(4)

    def take(_: int) -> tuple[str, FileLock]:
        together.wait(60)
        return take_folder(str(tmp_path / "out"), in_place=False)

    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(take, range(4)))  # with the locks, which are released with their objects
    assert sorted(folder for folder, _ in taken) == [
        str(tmp_path / name) for name in ("out", "out-2", "out-3", "out-4")
    ]


def test_a_folder_in_which_a_run_saved_and_ended_meanwhile_is_left_alone(tmp_path, monkeypatch):
    folder, acquire = tmp_path / "out", checkpoint._acquire

    def late(name: str) -> Any:
        if name == str(folder):
            (folder / "checkpoint-1").mkdir(parents=True)
        return acquire(name)

    monkeypatch.setattr(checkpoint, "_acquire", late)
    assert take_folder(str(folder), in_place=False)[0] == f"{folder}-2"
    monkeypatch.undo()
    assert take_folder(str(folder), in_place=True)[0] == str(folder)  # its lock was released


def test_a_folder_that_cannot_be_written_to_is_a_sentence():
    with pytest.raises(ConfigError, match="output_dir='/proc/self' cannot be written to"):
        take_folder("/proc/self", in_place=True)  # a folder in which nobody may make a file
