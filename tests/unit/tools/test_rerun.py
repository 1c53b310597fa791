"""`grpo-ext rerun` starts the script of a run again, with its settings, on any number of processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from grpo_ext.errors import ConfigError
from grpo_ext.tools.cli import app
from grpo_ext.tools.rerun import RECIPE

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
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    settings = {"learning_rate": 1e-5, "rewards": ["a:b"], "output_dir": "elsewhere", "resume_from_checkpoint": "auto"}
    recipe = {"script": str(tmp_path / "script.py"), "folder": str(tmp_path), "settings": settings}
    (tmp_path / "run" / RECIPE).write_text(json.dumps(recipe))
    return tmp_path / "run"


def started(run: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((run.parent / f"rank_{rank}.json").read_text())


def test_the_script_runs_where_it_ran_with_its_settings_and_further_options(run):
    further = ["--per_device_train_batch_size", "3", "--forward", "padded"]
    assert CliRunner().invoke(app, ["rerun", str(run), "--step", "12", "--gradients", *further]).exit_code == 0
    about = started(run)
    assert yaml.safe_load(about["settings"]) == {"learning_rate": 1e-5, "rewards": ["a:b"]}
    options = " ".join(about["argv"])
    assert f"--output_dir {run} --rerun 12 --rerun_gradients True --rerun_rewards False" in options
    assert options.endswith(" ".join(further))
    assert (about["folder"], about["world"]) == (str(run.parent), None)


def test_a_status_is_passed_on_and_ends_the_other_processes(run, monkeypatch):
    monkeypatch.setenv("STATUS", "1")
    assert CliRunner().invoke(app, ["rerun", str(run), "--step", "2", "--processes", "2"]).exit_code == 1
    assert [started(run, rank)["world"] for rank in (0, 1)] == ["2", "2"]


@pytest.mark.parametrize(
    ("missing", "what"), [("run/recipe.json", "recipes/grpo.py did not start"), ("script.py", "is gone")]
)
def test_a_run_that_no_script_can_repeat_names_the_method(run, missing, what):
    (run.parent / missing).unlink()
    result = CliRunner().invoke(app, ["rerun", str(run), "--step", "2"])
    assert isinstance(result.exception, ConfigError)
    assert what in str(result.exception)
    assert "trainer.rerun(step=N)" in str(result.exception)
