"""The trail of a run on several processes, and where an engine holds parts of the weights."""

from pathlib import Path

import pytest

from grpo_ext.run.diff import diff
from grpo_ext.run.record import read_record
from tests.support.cases import Bench
from tests.support.launches import run_all
from tests.support.selection import few_of


# with "dapo" a run of one process is compared below
@pytest.mark.parametrize("case", few_of(["dapo", "cut_dynamic", "ahead_gspo"], ["cut_dynamic"]))
def test_one_and_two_processes_have_one_trail(tmp_path, case):
    bench, folders = Bench(tmp_path), [tmp_path / "1", tmp_path / "2"]
    for processes, folder in enumerate(folders, 1):
        [result] = run_all([bench.run(case, 4, output_dir=str(folder), logging_steps=2)], processes)
        assert result.error is None, result.error
    found = diff(*folders)
    assert (found.verdict, found.first) == ("rounding", None), found.text
    assert any("num_processes 1 -> 2" in note for note in found.notes)
    steps = read_record(Path(folders[1])).steps
    assert [step for step, line in steps.items() if "weights" in line] == [
        0,
        *(s for s in steps if s and s % 2 == 0),
        *([max(steps)] if max(steps) % 2 else []),
    ]


@pytest.mark.full
def test_a_run_that_is_resumed_on_two_processes_has_the_trail_of_one(tmp_path):
    bench, saves = Bench(tmp_path), {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    one, two = (str(tmp_path / str(processes)) for processes in (1, 2))
    assert run_all([bench.run("dapo", 4, output_dir=one, **saves)], 1)[0].error is None
    resume = f"{one}/checkpoint-1"
    assert run_all([bench.run("dapo", 3, output_dir=two, resume_from=resume, **saves)], 2)[0].error is None
    found = diff(one, two)
    assert (found.verdict, found.missing) == ("rounding", []), found.text
    assert found.begins is not None
    assert found.begins.step == 2
    assert found.steps == max(read_record(Path(two)).steps) > 2
