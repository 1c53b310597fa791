"""The run log: strict lines, and what a reader makes of kills and resumes."""

import json
import math

import pytest
import torch

from grpo_ext.run.log import LOG, RunLog, read_log

CPU = torch.device("cpu")


def begun(folder, step=0, source=None):
    """The log of a run in `folder`, resumed from a checkpoint in `source` if `step` is not 0."""
    log = RunLog()
    folder.mkdir(exist_ok=True)
    log.begin(folder, str((source or folder) / f"checkpoint-{step}") if step else None, step, {"seed": step})
    return log


def write(log, step, **values):
    log.write(step, step / 10, values or {"reward": float(step)}, CPU)


def lines(folder):
    *whole, rest = (folder / LOG).read_text().split("\n")
    assert rest == ""
    return [json.loads(line, parse_constant=pytest.fail) for line in whole][1:]


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
    path = tmp_path / LOG
    path.write_bytes(path.read_bytes()[:-20])
    run = read_log(path)
    assert [entry["step"] for entry in run.entries] == [1]
    write(begun(tmp_path, 1), 2, reward=9.0)
    run = read_log(path)
    assert [(entry["step"], entry["values"]["reward"]) for entry in run.entries] == [(1, 1.0), (2, 9.0)]
    assert len(lines(tmp_path)) == 3  # two of the values, and the second start


def test_a_second_resume_supersedes_the_log_of_the_first(tmp_path):
    """An evaluation that was put off, made by a run that was killed before its next checkpoint, and made again."""
    write(begun(tmp_path), 1)
    for score in (0.25, 0.5):
        log = begun(tmp_path, 1)
        write(log, 1, eval_reward=score)
        write(log, 2)
    values = [entry["values"] for entry in read_log(tmp_path / LOG).entries]
    assert values == [{"reward": 1.0}, {"eval_reward": 0.5}, {"reward": 2.0}]


def test_a_log_that_cannot_be_written_does_not_end_the_training(tmp_path):
    log = begun(tmp_path)
    (tmp_path / LOG).unlink()
    (tmp_path / LOG).mkdir()
    write(log, 1)
    assert log._file.path is None
    write(log, 2)
