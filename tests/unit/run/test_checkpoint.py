"""A checkpoint is whole or absent, and what is broken is named; the folder of a run is taken by one run at a time."""

import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from grpo_ext.errors import CheckpointError, ConfigError
from grpo_ext.run.checkpoint import (
    LISTING,
    checkpoints,
    find_checkpoint,
    folder_beside,
    lock_new,
    lock_to_resume,
    publish,
    rotate,
    run_to_resume,
    why_broken,
    write_listing,
    writing_folder,
)


def make(run: Path, step: int) -> Path:
    written = writing_folder(run, "checkpoint") / f"checkpoint-{step}"
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


def test_a_checkpoint_with_the_hashes_of_an_earlier_version_is_refused(tmp_path):
    folder = make(tmp_path, 2)
    listing = json.loads((folder / LISTING).read_text())
    listing.pop("sha256")
    for path, entry in listing["files"].items():
        del entry["xxh3_128"]
        entry["sha256"] = hashlib.sha256((folder / path).read_bytes()).hexdigest()
    digest = hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()
    (folder / LISTING).write_text(json.dumps({**listing, "sha256": digest}))
    assert "or another version wrote it (its xxh3_128 hash differs)" in str(why_broken(folder))


def test_an_unfinished_save_is_ignored_and_removed(tmp_path):
    make(tmp_path, 1)
    half = writing_folder(tmp_path, "checkpoint") / "checkpoint-2"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]
    lock_to_resume(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_running.lock", "checkpoint-1"]


def test_rotation_deletes_the_oldest_checkpoints_beyond_the_limit(tmp_path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    rotate(tmp_path, 3)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_runs_that_start_at_once_take_folders_of_their_own(tmp_path):
    together = threading.Barrier(4)

    def take(_: int) -> tuple[Path, FileLock]:
        together.wait(60)
        return lock_new(tmp_path / "out")

    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(take, range(4)))  # with the locks, which are released with their objects
    assert sorted(folder.name for folder, _ in taken) == ["out", "out-2", "out-3", "out-4"]


def begun(folder: Path, *steps: int) -> Path:
    """The folder of a new run that has ended, with checkpoints of these steps."""
    run, lock = lock_new(folder)
    lock.release()
    for step in steps:
        make(run, step)
    return run


def test_a_resume_finds_the_newest_run_that_an_output_dir_was_given(tmp_path):
    folder = tmp_path / "out"
    first, second = begun(folder, 1), begun(folder, 2)
    third = begun(folder)  # ended before it saved
    make(tmp_path / "out-9", 5)  # a user's own, and copies
    make(tmp_path / "other-2", 5)
    shutil.copytree(second, tmp_path / "copy")
    assert [path.name for path in (first, second, third)] == ["out", "out-2", "out-3"]
    for word in ("latest", True, "auto"):
        assert run_to_resume(word, folder) == second
        assert run_to_resume(word, second) == second  # named by its own folder
    assert run_to_resume(str(first / "checkpoint-1"), folder) == first
    for elsewhere in (None, str(tmp_path / "out-9" / "checkpoint-5"), str(tmp_path / "other-2" / "checkpoint-5")):
        assert run_to_resume(elsewhere, folder) is None
    assert run_to_resume("auto", tmp_path / "new") is None
    assert begun(second, 1).name == "out-4"  # it belongs to `out`
    assert begun(tmp_path / "copy", 1).name == "copy-2"
    shutil.rmtree(second)
    shutil.rmtree(first)
    assert begun(folder, 1).name == "out-5"  # never before an earlier run
    assert run_to_resume("latest", folder) == tmp_path / "out-5"


def test_the_newest_run_is_named_if_all_its_checkpoints_are_broken(tmp_path):
    first, second = begun(tmp_path / "out", 1, 2), begun(tmp_path / "out", 1)
    (second / "checkpoint-1" / "optimizer.pt").unlink()
    says = f"{second} holds no complete checkpoint: .*optimizer.pt is missing.*name one of another run by its path"
    for word in ("latest", "auto"):  # what it learned would be lost if the one before it went on
        with pytest.raises(CheckpointError, match=says):
            find_checkpoint(word, run_to_resume(word, tmp_path / "out"))
    (second / "checkpoint-1").rename(second / "removed")
    assert find_checkpoint("latest", run_to_resume("latest", tmp_path / "out")) == str(first / "checkpoint-2")


@pytest.mark.parametrize(
    ("name", "mark", "newest"),
    [
        ("out-2", '{"folder": "out-2"}', "out-2"),
        ("out-2", '{"folder": "out-2", "more": 1}', "out-2"),
        ("out-2", '{"from": "out-2"}', "out"),
        ("out-2", '["out-2"]', "out"),
        ("out-2", '{"folder": "out-2"', "out"),
        ("out", '{"folder": "out"}', "out"),
    ],
)
def test_a_run_is_beside_an_output_dir_by_its_mark(tmp_path, name, mark, newest):
    for folder in {"out", name}:
        make(tmp_path / folder, 1)
    (tmp_path / name / "_run.json").write_text(mark)
    assert run_to_resume(True, tmp_path / "out") == tmp_path / newest
    assert folder_beside(tmp_path / "out").name == ("out-3" if name == "out-2" else "out-2")


def test_a_folder_beside_is_never_one_that_is_there(tmp_path):
    (tmp_path / "demo-1").mkdir()
    (tmp_path / "demo-2").write_text("the user's")
    assert folder_beside(tmp_path / "demo", 1).name == "demo-3"
    assert list((tmp_path / "demo-1").iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_a_sentence():
    with pytest.raises(ConfigError, match="output_dir='/proc/self' cannot be written to"):
        lock_new("/proc/self")  # a folder in which nobody may make a file
