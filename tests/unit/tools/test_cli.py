"""The command line, as a user types it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from grpo_ext.errors import ConfigError
from grpo_ext.tools import cli
from grpo_ext.tools.cli import app, integers, read_config

runner = CliRunner()


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "grpo_ext.tools.cli", *args], capture_output=True, text=True)


def test_plan_prints_the_layout_for_any_number_of_processes():
    done = run(
        "plan", "--global_batch_size", "16", "--num-generations", "4", "--num_processes", "3", "--num_prompts", "10"
    )
    assert done.returncode == 0, done.stderr
    assert "16 completions = 4 prompts x 4" in done.stdout
    assert "10 prompts = 3 optimizer steps" in done.stdout
    assert "2 prompts = 8 completions" in done.stdout


def test_plan_reads_the_settings_of_a_recipe(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("global_batch_size: 24\nnum_generations: 4\nlearning_rate: 1.0e-5\n")
    assert "24 completions = 6 prompts x 4" in run("plan", "--config", str(path)).stdout


def test_plan_shows_a_token_budget(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("micro_batch_tokens: 4096\n")
    assert "up to 8 completions and 4096 tokens per device" in run("plan", "--config", str(path)).stdout
    assert "or more, by length" in run("plan", "--micro_batch_tokens", "2048").stdout


def test_an_error_is_one_message_and_status_2():
    done = run("plan", "--global_batch_size", "15", "--num_generations", "4")
    assert done.returncode == 2
    assert "set global_batch_size to 12 or 16" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_plan_loads_no_model_library():
    code = "import sys, grpo_ext.tools.cli as c; c.plan(num_processes=2); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("False")


def test_lists_and_files_are_checked(tmp_path):
    assert integers("16,5,1", "sizes") == [16, 5, 1]
    with pytest.raises(ConfigError, match="no list of whole numbers"):
        integers("16,x", "sizes")
    with pytest.raises(ConfigError, match="below 1"):
        integers("0", "sizes")
    with pytest.raises(ConfigError, match="is no file"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds no settings"):
        read_config(tmp_path / "list.yaml")


@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_misspelt_setting_in_a_file_is_refused(tmp_path, command):
    file = tmp_path / "run.yaml"
    file.write_text("global_batchsize: 32\nrewards: [exact_number]\n")
    result = runner.invoke(app, [command, "--config", str(file)])
    assert isinstance(result.exception, ConfigError)
    assert "'global_batchsize' is no setting; did you mean 'global_batch_size'?" in str(result.exception)
    file.write_text("global_batch_size: 32\nper_device_eval_batch_size: 2\nrewards: [exact_number]\n")
    if command == "plan":
        assert runner.invoke(app, [command, "--config", str(file)]).exit_code == 0


def test_square_brackets_reach_the_reader(monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", lambda: (_ for _ in ()).throw(ConfigError("pip install 'grpo-ext[plot]'")))
    with pytest.raises(SystemExit):
        cli.main()
    assert "pip install 'grpo-ext[plot]'" in capsys.readouterr().err
    plan = runner.invoke(app, ["plan", "--help"]).output
    assert "(default: 8)" in " ".join(plan.split())
