"""`grpo-ext rerun` starts the script of a run again, with its settings, on any number of processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from grpo_ext.errors import ConfigError
from grpo_ext.run.record import STEPS
from grpo_ext.tools.cli import app
from grpo_ext.tools.rerun import RECIPE
from tests.support.launch import ROOT
from tests.support.trails import write_lines

SCRIPT = """
import json, os, sys, time
from pathlib import Path
settings = Path(sys.argv[sys.argv.index("--config") + 1]).read_text()
about = {"argv": sys.argv[1:], "settings": settings, "folder": os.getcwd(), "world": os.environ.get("WORLD_SIZE")}
rank = os.environ.get("RANK", "0")
Path(f"rank_{rank}.json").write_text(json.dumps(about))
if rank == "1":
    time.sleep(60)  # waits for the process that has failed
while os.environ.get("WORLD_SIZE") == "2" and not Path("rank_1.json").exists():
    time.sleep(0.01)
if "NOTHING" not in os.environ:
    folder = Path(sys.argv[sys.argv.index("--output_dir") + 1], "rerun", "step")
    folder.mkdir(parents=True)
    from grpo_ext.run.record import line_of
    (folder / "step.jsonl").write_bytes(line_of({"step": 1, "verdict": os.environ.get("VERDICT", "same bits")}))
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    settings = {"learning_rate": 1e-5, "rewards": ["a:b"], "output_dir": "elsewhere", "resume_from_checkpoint": "auto"}
    recipe = {"script": str(tmp_path / "script.py"), "folder": str(tmp_path), "settings": settings}
    (tmp_path / "run" / RECIPE).write_text(json.dumps(recipe))
    lines = [{"line": "start", "step": 0}, *({"line": "step", "step": n, "values": {}} for n in range(1, 13))]
    write_lines(tmp_path / "run" / STEPS, lines)
    return tmp_path / "run"


def rerun(run: Path, *options: str, named: bool = True) -> Any:
    script = ["--script", str(run.parent / "script.py")] if named else []
    return CliRunner().invoke(app, ["rerun", str(run), *script, "--step", "2", *options])


def started(run: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((run.parent / f"rank_{rank}.json").read_text())


def test_the_script_runs_where_it_ran_with_its_settings_and_further_options(run):
    further = ["--per_device_train_batch_size", "3", "--forward", "padded"]
    assert rerun(run, "--step", "12", "--gradients", *further).exit_code == 0
    about = started(run)
    assert yaml.safe_load(about["settings"]) == {"learning_rate": 1e-5, "rewards": ["a:b"]}
    options = " ".join(about["argv"])
    assert f"--output_dir {run} --rerun 12 --rerun_gradients True --rerun_rewards False" in options
    assert options.endswith(" ".join(further))
    assert (about["folder"], about["world"]) == (str(run.parent), None)


def test_cases_are_handed_on(run):
    assert rerun(run, "--case", "epsilon=0.3", "--case", "loss_type=dr_grpo,beta=0.01").exit_code == 0
    assert " --rerun_cases epsilon=0.3 loss_type=dr_grpo,beta=0.01" in " ".join(started(run)["argv"])


@pytest.mark.parametrize(("verdict", "status"), [("rounding", 0), ("few tokens", 1), ("different", 1)])
def test_the_status_is_that_of_the_verdict_whatever_fails_later(run, monkeypatch, verdict, status):
    monkeypatch.setenv("VERDICT", verdict)
    monkeypatch.setenv("STATUS", "1")
    assert rerun(run).exit_code == status


@pytest.mark.full
def test_a_process_that_fails_ends_the_others(run, monkeypatch):
    monkeypatch.setenv("STATUS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert rerun(run, "--processes", "2").exit_code == 0
    assert [started(run, rank)["world"] for rank in (0, 1)] == ["2", "2"]


@pytest.mark.parametrize("status", ["0", "1", "3"])
def test_a_script_that_ran_no_step_again_is_no_difference(run, monkeypatch, status):
    monkeypatch.setenv("STATUS", status)
    monkeypatch.setenv("NOTHING", "1")
    assert rerun(run).exit_code == 2


def test_a_script_that_a_folder_names_is_not_run_by_itself(run):
    result = rerun(run, named=False)
    assert isinstance(result.exception, ConfigError)
    assert f"pass --script {run.parent / 'script.py'}" in str(result.exception)
    assert not (run.parent / "rank_0.json").exists()


@pytest.mark.parametrize("settings", [{"rewards": ["evil.py:f"]}, {"demo": "evil.py:d"}, {"trust_remote_code": True}])
def test_nor_is_code_that_its_settings_name(run, settings):
    recipe = json.loads((run / RECIPE).read_text())
    recipe |= {"script": str(ROOT / "recipes" / "grpo.py"), "settings": settings}
    (run / RECIPE).write_text(json.dumps(recipe))
    result = rerun(run, named=False)
    assert isinstance(result.exception, ConfigError)
    assert "names code beyond" in str(result.exception)
    assert next(iter(settings)) in str(result.exception)


def test_a_step_that_the_record_lacks_is_refused_before_anything_is_started(run):
    result = rerun(run, "--step", "13")
    assert isinstance(result.exception, ConfigError)
    assert "has no step 13; its record has the steps 1 to 12" in str(result.exception)
    assert not (run.parent / "rank_0.json").exists()


@pytest.mark.parametrize(
    ("missing", "what"), [("run/recipe.json", "recipes/grpo.py did not start"), ("script.py", "is gone")]
)
def test_a_run_that_no_script_can_repeat_names_the_method(run, missing, what):
    (run.parent / missing).unlink()
    result = rerun(run)
    assert isinstance(result.exception, ConfigError)
    assert what in str(result.exception)
    assert "trainer.rerun(step=N)" in str(result.exception)


@pytest.mark.parametrize(
    ("recipe", "options", "what"),
    [
        (None, ["--output_dir", "elsewhere"], "--output_dir: a step runs again in the run's folder"),
        (None, ["--config=other.yaml"], "with the run's settings"),
        ("{", [], "recipe.json is not as it was written"),
        ('{"script": "a"}', [], "KeyError: 'folder'"),
    ],
)
def test_what_cannot_be_started_says_why(run, recipe, options, what):
    if recipe is not None:
        (run / RECIPE).write_text(recipe)
    result = rerun(run, *options)
    assert isinstance(result.exception, ConfigError)
    assert what in str(result.exception)
    assert not (run.parent / "rank_0.json").exists()


def test_a_signal_ends_what_was_started(run):
    (run.parent / "script.py").write_text("import pathlib, time; pathlib.Path('began').touch(); time.sleep(60)")
    script = str(run.parent / "script.py")
    command = [sys.executable, "-m", "grpo_ext.tools.cli", "rerun", str(run), "--step", "2", "--script", script]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True) as process:
        while not (run.parent / "began").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):  # nothing of its group is left
        os.killpg(process.pid, 0)
