"""The command line, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from peft import LoraConfig
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


def test_an_option_of_a_plan_wins_over_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("global_batch_size: 16\nnum_train_epochs: 5\ndataloader_drop_last: true\n")
    done = runner.invoke(app, ["plan", "--config", str(path), "--num_prompts", "5", "--num_train_epochs", "1"])
    assert "5 prompts = 2 optimizer steps" in done.output, done.output
    assert runner.invoke(app, ["plan", "--config", str(path), "--num_prompts", "5"]).output != done.output
    kept = runner.invoke(
        app,
        ["plan", "--config", str(path), "--num_prompts", "5", "--num_train_epochs", "1", "--no-dataloader-drop-last"],
    )
    assert "5 prompts = 3 optimizer steps" in kept.output, kept.output


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
    code = "import sys; from grpo_ext.tools.cli import app; app(['plan'], standalone_mode=False); "
    code += "print('torch' in sys.modules)"
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


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """Runs `grpo-ext check --config` with a file; returns what would be checked, and what was said."""
    seen = {}

    def check(model, dataset, rewards, settings, **options):
        seen.update(model=model, dataset=dataset, rewards=rewards, settings=settings, **options)
        raise ConfigError("stop here")

    monkeypatch.setattr("grpo_ext.tools.check.check", check)

    def run(content, *flags):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
        result = runner.invoke(app, ["check", "--config", str(tmp_path / "run.yaml"), *flags])
        return seen, result

    return run


def test_a_check_takes_model_data_rewards_and_adapter_from_the_file_of_the_run(checked, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n{"question": "2", "answer": "2"}\n')
    adapter = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    data = {"dataset_name": str(tmp_path / "data.jsonl"), "prompt_column": "question", "max_samples": 1}
    file = {"model_name_or_path": "some/model", "rewards": ["exact_number"], "beta": 0.1, "seed": 7, **data, **adapter}
    seen, result = checked(file)
    assert str(result.exception) == "stop here"
    assert seen["model"] == "some/model"
    assert seen["dataset"]["prompt"] == ["1 + 1"]
    assert [f.__name__ for f in seen["rewards"]] == ["exact_number"]
    assert (
        LoraConfig(**seen["peft"]).to_dict()
        == LoraConfig(
            r=4, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ).to_dict()
    )
    assert (seen["settings"]["beta"], seen["settings"]["seed"]) == (0.1, 7)
    assert not seen["settings"].keys() & file.keys() - {"beta", "seed"}
    assert "Checking some/model on " in result.output
    assert "LoRA of rank 4" in result.output
    seen, _ = checked(file, "--model", "other/model")  # an option wins
    assert seen["model"] == "other/model"


def test_a_check_refuses_half_a_task_and_names_the_demo(checked, monkeypatch):
    _, result = checked({"model_name_or_path": "some/model", "rewards": ["exact_number"]})
    assert "dataset_name=None" in str(result.exception)
    assert "either give all three" in str(result.exception)
    _, result = checked({"nothing": 1})
    assert "'nothing' is no setting" in str(result.exception)
    demo = SimpleNamespace(model_path="demo/model", train_dataset=None, reward_funcs=[len])
    monkeypatch.setattr("grpo_ext.demo.task.load_demo", lambda: demo)
    ignored = {"dtype": "bfloat16", "model_revision": "main", "use_bnb_nested_quant": True, "output_dir": "out"}
    seen, result = checked({"learning_rate": 0.5, **ignored, "max_samples": 4})
    said = (
        "Checking the demo, all weights; dtype, max_samples, model_revision, output_dir, use_bnb_nested_quant left out"
    )
    assert said in result.output
    assert (seen["model"], seen["peft"], seen["settings"]["learning_rate"]) == ("demo/model", None, 0.5)


def test_a_plan_takes_adapter_and_precision_from_the_file_of_the_run(tmp_path):
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForCausalLM"]}))
    file = tmp_path / "run.yaml"

    def planned(content, *flags):
        file.write_text(yaml.safe_dump(content))
        arguments = ["plan", "--config", str(file), "--model", str(tmp_path / "config.json"), *flags]
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0, result.exception
        return result.output

    full, lora = planned({"beta": 0.0}), planned({"use_peft": True, "lora_r": 4})
    assert lora == planned({"beta": 0.0}, "--lora-rank", "4") != full
    assert planned({"bf16": False}) == planned({"beta": 0.0}, "--compute", "float32") != full
    assert planned({"fp16": True}) == planned({"beta": 0.0}, "--compute", "float16")
