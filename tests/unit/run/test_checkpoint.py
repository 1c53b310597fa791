"""A checkpoint is whole or absent, and what is broken is named; the folder of a run is taken by one run at a time."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from grpo_ext.errors import ConfigError
from grpo_ext.run.checkpoint import (
    LISTING,
    checkpoints,
    find_checkpoint,
    publish,
    record_start,
    rotate,
    run_to_resume,
    runs_of,
    take_folder,
    why_broken,
    write_listing,
    writing_folder,
)


def make(run: Path, step: int) -> Path:
    written = writing_folder(run) / f"checkpoint-{step}"
    (written / "sub").mkdir(parents=True)
    (written / "model.safetensors").write_bytes(bytes(range(200)) * 10)
    for name in ("optimizer.pt", "scheduler.pt"):
        (written / name).write_bytes(b"state")
    (written / "sub" / "rng.pth").write_bytes(b"random")
    write_listing(written, {"step": step})
    final = run / f"checkpoint-{step}"
    publish(written, final)
    return final


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 1999), "model.safetensors has 1999 bytes instead of"),
        (lambda folder: (folder / "sub" / "rng.pth").unlink(), "sub/rng.pth is missing"),
        (lambda folder: (folder / LISTING).write_text('{"files": '), "checkpoint.json is broken"),
    ],
)
def test_damage_is_found_and_the_file_is_named(tmp_path, damage, says, caplog):
    good, bad = make(tmp_path, 2), make(tmp_path, 10)
    damage(bad)
    assert says in str(why_broken(bad))
    assert find_checkpoint("latest", str(tmp_path)) == str(good)
    assert f"Skipped a checkpoint: {why_broken(bad)}." in caplog.text


def test_an_unfinished_save_is_ignored_and_removed(tmp_path):
    make(tmp_path, 1)
    half = writing_folder(tmp_path) / "checkpoint-2"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]
    take_folder(str(tmp_path), in_place=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_running.lock", "checkpoint-1"]


def test_rotation_deletes_the_oldest_checkpoints_beyond_the_limit(tmp_path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    rotate(tmp_path, 3)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_runs_that_start_at_once_take_folders_of_their_own(tmp_path):
    together = threading.Barrier(4)

    def take(_: int) -> tuple[str, FileLock]:
        together.wait(60)
        return take_folder(str(tmp_path / "out"), in_place=False)

    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(take, range(4)))  # with the locks, which are released with their objects
    assert sorted(Path(folder).name for folder, _ in taken) == ["out", "out-2", "out-3", "out-4"]


def taken(folder: Path, in_place: bool = False, steps: tuple[int, ...] = ()) -> Path:
    """The folder of a run that started and ended, with checkpoints of these steps."""
    name, lock = take_folder(str(folder), in_place)
    record_start(name, folder)
    lock.release()
    for step in steps:
        make(Path(name), step)
    return Path(name)


def test_a_resume_finds_the_folders_that_an_output_dir_was_given(tmp_path):
    folder = tmp_path / "out"
    first, second = taken(folder, steps=(1,)), taken(folder, steps=(2,))
    third = taken(folder)  # ended before it saved
    make(tmp_path / "out-9", 5)  # a user's own: nothing says that `out` was given it
    make(tmp_path / "other-2", 5)
    assert [path.name for path in (first, second, third)] == ["out", "out-2", "out-3"]
    assert runs_of(folder) == [first, second, third]
    for word in ("latest", True, "auto"):
        assert run_to_resume(word, str(folder)) == second
    assert run_to_resume(str(first / "checkpoint-1"), str(folder)) == first
    for elsewhere in (None, str(tmp_path / "out-9" / "checkpoint-5"), str(tmp_path / "other-2" / "checkpoint-5")):
        assert run_to_resume(elsewhere, str(folder)) is None
    assert run_to_resume("auto", str(tmp_path / "new")) is None
    taken(first, in_place=True)  # a run that goes on is the one that started last
    assert runs_of(folder) == [second, third, first]
    taken(second, in_place=True)  # named by its own folder, it still belongs to `out`
    assert run_to_resume("latest", str(folder)) == second


def test_a_folder_that_cannot_be_written_to_is_a_sentence():
    with pytest.raises(ConfigError, match="output_dir='/proc/self' cannot be written to"):
        take_folder("/proc/self", in_place=True)  # a folder in which nobody may make a file
