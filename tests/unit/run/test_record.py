"""A run's record: strict lines, and what a reader makes of kills, resumes, damage and other runs in the folder."""

import json
import math
import os

import pytest
import torch

from grpo_ext.errors import ConfigError
from grpo_ext.run.log import RunLog
from grpo_ext.run.record import STEPS, line_of, read_record, tables_of

CPU = torch.device("cpu")


def begun(folder, step=0, source=None):
    """The log of a run in `folder`, resumed from a checkpoint in `source` if `step` is not 0."""
    log = RunLog()
    folder.mkdir(exist_ok=True)
    log.begin(
        folder, str((source or folder) / f"checkpoint-{step}") if step else None, step, {"seed": step, "trail": True}
    )
    return log


def write(log, step, **values):
    log.write(step, step / 10, values or {"reward": float(step)}, CPU)


def lines(folder):
    *whole, rest = (folder / STEPS).read_text().split("\n")
    assert rest == ""
    parsed = [json.loads(line, parse_constant=pytest.fail) for line in whole]
    return parsed[1:]


def test_lines_are_strict_json_with_step_time_and_memory(tmp_path):
    log = begun(tmp_path)
    write(log, 3, reward=math.nan, kl=-math.inf, loss=torch.tensor(0.5), epoch=0.3, device=CPU, tokens=7)
    (line,) = lines(tmp_path)
    assert line["values"] == {"reward": None, "kl": None, "loss": 0.5, "device": "cpu", "tokens": 7}
    assert (line["step"], line["epoch"]) == (3, 0.3)
    assert 0 <= line["time"] < 60
    assert line["peak_memory_mib"] > 50


def test_an_unfinished_last_line_is_left_out_and_the_next_one_is_whole(tmp_path):
    log = begun(tmp_path)
    for step in (1, 2):
        write(log, step)
    path = tmp_path / STEPS
    path.write_bytes(path.read_bytes()[:-20])
    run = read_record(tmp_path)
    assert [entry["step"] for entry in run.entries] == [1]
    write(begun(tmp_path, 1), 2, reward=9.0)
    run = read_record(tmp_path)
    assert [(entry["step"], entry["values"]["reward"]) for entry in run.entries] == [(1, 1.0), (2, 9.0)]
    assert len(lines(tmp_path)) == 3  # two of the values, and the second start


def test_a_second_resume_supersedes_the_log_of_the_first(tmp_path):
    """An evaluation that was put off, made by a run that was killed before its next checkpoint, and made again."""
    write(begun(tmp_path), 1)
    for score in (0.25, 0.5):
        log = begun(tmp_path, 1)
        write(log, 1, eval_reward=score)
        write(log, 2)
    values = [entry["values"] for entry in read_record(tmp_path).entries]
    assert values == [{"reward": 1.0}, {"eval_reward": 0.5}, {"reward": 2.0}]


def test_a_log_that_cannot_be_written_does_not_end_the_training(tmp_path):
    log = begun(tmp_path)
    (tmp_path / STEPS).unlink()
    (tmp_path / STEPS).mkdir()
    write(log, 1)
    assert log.path is None
    write(log, 2)


def test_a_start_supersedes_what_comes_after_its_step(tmp_path):
    for start, steps in ((0, range(1, 5)), (2, range(3, 5))):
        log = begun(tmp_path, start)
        for step in steps:
            log.step(step, {"loss": float(start)}, None)
            write(log, step, reward=float(start))
    begun(tmp_path, 3)
    record = read_record(tmp_path)
    assert {step: line["values"]["loss"] for step, line in record.steps.items()} == {1: 0.0, 2: 0.0, 3: 2.0}
    assert [entry["values"]["reward"] for entry in record.entries] == [0.0, 0.0, 2.0]
    assert [record.start_of(step)["seed"] for step in (1, 2, 3, 4)] == [0, 0, 2, 3]
    assert record.resumed_from == [2, 3]


def test_a_start_without_a_trail_supersedes_steps_too(tmp_path):
    log = begun(tmp_path)
    for step in (1, 2, 3):
        log.step(step, {"loss": 1.0}, None)
    log = RunLog()
    log.begin(tmp_path, str(tmp_path / "checkpoint-2"), 2, {"trail": False})
    log.step(3, {"loss": 2.0}, None)
    assert [*read_record(tmp_path).steps] == [1, 2]


@pytest.mark.parametrize("recorded", [True, False])
def test_lines_of_another_run_in_a_reused_folder_are_not_this_runs(tmp_path, recorded):
    """A run that was resumed from a checkpoint elsewhere, whose folder may have no record."""
    for step in (1, 2, 3):
        write(begun(tmp_path / "reused", step - 1), step, reward=-1.0)
    (tmp_path / "source").mkdir()
    if recorded:
        write(begun(tmp_path / "source"), 1, reward=5.0)
    write(begun(tmp_path / "reused", 2, source=tmp_path / "source"), 3, reward=6.0)
    rewards = [entry["values"]["reward"] for entry in read_record(tmp_path / "reused").entries]
    assert rewards == ([5.0, 6.0] if recorded else [6.0])


def test_tables_of_an_earlier_run_are_not_this_runs(tmp_path):
    log = begun(tmp_path)
    (tmp_path / "completions").mkdir()
    for step in (1, 2, 3):
        write(log, step)
        (tmp_path / "completions" / f"completions_{step:05d}.parquet").touch()
    os.utime(tmp_path / "completions" / "completions_00002.parquet", (1e9, 1e9))
    (tmp_path / "completions" / "completions_00007.parquet").touch()
    assert [*tables_of(tmp_path, read_record(tmp_path))] == [1, 3]


START = {"line": "start", "step": 0, "trail": True}
STEP = {"line": "step", "step": 1, "values": {"loss": 1.0}}
DAMAGED = {
    "a digit": line_of(STEP).replace(b"1.0", b"2.0"),
    "a line without its checksum": json.dumps(STEP).encode() + b"\n",
    "half a line": line_of(STEP)[:30] + b"\n",
    "no line": b"\n",
    "another file's bytes": bytes(range(256)) + b"\n",
    "nesting": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_line_that_was_damaged_is_named(tmp_path, kind):
    number = 2 + DAMAGED[kind].count(b"\n") - 1  # the bytes of another file hold a line end themselves
    (tmp_path / STEPS).write_bytes(line_of(START) + DAMAGED[kind] + line_of(STEP))
    with pytest.raises(ConfigError, match=rf"{STEPS}: line [2-{number}] is not as it was written"):
        read_record(tmp_path)


def test_a_last_line_that_is_cut_is_left_out_and_the_trail_is_read_where_it_is_needed(tmp_path):
    (tmp_path / STEPS).write_bytes(line_of(START) + line_of(STEP) + line_of({**STEP, "step": 2})[:-5])
    assert [*read_record(tmp_path).steps] == [1]
    (tmp_path / STEPS).write_bytes(line_of(START) + DAMAGED["a digit"])
    assert read_record(tmp_path, trail=False).steps == {}


def test_the_record_of_an_earlier_version_is_refused_by_name(tmp_path):
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(ConfigError, match=r"an earlier version of grpo_ext wrote .*log\.jsonl"):
        read_record(tmp_path)
