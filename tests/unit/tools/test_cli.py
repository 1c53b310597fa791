"""The command line, as a user types it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from trl import ModelConfig, TrlParser
from typer.testing import CliRunner

from grpo_ext import GRPOConfig
from grpo_ext.errors import ConfigError
from grpo_ext.tools import config_source
from grpo_ext.tools.cli import app, integers
from grpo_ext.tools.options import ScriptArguments, kinds_of_options, read_settings
from tests.support import forks

runner = CliRunner()


def test_an_error_is_one_message_and_status_2():
    done = forks.python("-m", "grpo_ext.tools.cli", "plan", "--global_batch_size", "15", "--num_generations", "4")
    assert done.returncode == 2
    assert "set global_batch_size to 12 or 16" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


SLOW = ("torch", "transformers", "datasets", "pandas")  # that take seconds to import
LOADED = f"""
import json, sys
from grpo_ext.errors import ConfigError
from grpo_ext.tools.cli import app
for words in json.loads(sys.argv[1]):
    exec(words.pop(0))
    try:
        app(words, standalone_mode=False)
    except ConfigError as error:
        print("refused:", error)
print("loaded:", *[name for name in {SLOW} if name in sys.modules])
"""
HELPS = [["--help"], *([name, "--help"] for name in ("plan", "check", "export", "report", "diff", "rerun"))]


def loaded_by(*commands: list[str], first: str = "", refused: Sequence[str] = ()) -> list[str]:
    """The slow libraries that commands import, in a process that begins with the statement `first`."""
    command_lines = json.dumps([[first, *words] for words in commands])
    done = subprocess.run([sys.executable, "-c", LOADED, command_lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall("refused: (.*)", done.stdout) == [*refused]
    return done.stdout.split("loaded:")[1].split()


def test_help_and_plans_without_a_model_load_no_slow_library(tmp_path):
    settings = {"learning_rate": "1e-5", "lr_scheduler_type": "cosine", "rollout_lag": 1, "rewards": ["a"]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    file = ["plan", "--config", str(tmp_path / "run.yaml"), "--top_k", "5"]
    option = ["plan", "--processes", "2", "--global_batch_size=16", "--bf16", "False", "--max_steps", "-1"]
    misspelt = [[command, "--max_stepz", "3"] for command in ("plan", "check")]
    refused = ["--max_stepz is not an option; did you mean --max_steps?"] * len(misspelt)
    assert loaded_by(*HELPS, ["plan"], file, option, *misspelt, refused=refused) == []
    assert loaded_by(["plan"], first="import pandas") == ["pandas"]


# what the class alone knows: types that are classes of other libraries, and a default that depends on torch
COMPUTED = {"parallelism_config": "type", "debug": "type", "optim": "default"}


def actions(training: type) -> dict[str, dict[str, Any]]:
    """What a parser of a run's options does with each, by its spellings; functions by their names."""
    options = {}
    for action in TrlParser((ScriptArguments, training, ModelConfig))._actions:
        choices, kind = list(action.choices or ()), getattr(action.type, "__name__", None)
        values = {**vars(action), "choices": choices, "type": kind, "container": None}
        options[", ".join(values.pop("option_strings"))] = values
    return options


def test_options_read_from_the_source_are_those_of_the_class():
    source = config_source.fields_in_source()
    read, real = actions(source), actions(GRPOConfig)
    assert [*read] == [*real]
    different = [(real[name]["dest"], key) for name in real for key in real[name] if read[name][key] != real[name][key]]
    assert dict(different) == COMPUTED
    words = "--global_batch_size 016 --bf16 n --max_steps=-1 --lora_r=8 --use_vllm --no-shuffle-dataset --top_p 1e-1"
    words += " --reward_weights 1 2 --run_name a:_b --optim sgd --delta none --report_to none --learning_rate 1e-6"
    kinds, without_torch = ((ScriptArguments, training, ModelConfig) for training in (GRPOConfig, source))
    assert read_settings(words.split(), without_torch) == read_settings(words.split(), kinds)
    for wrong in ("--max_steps abc", "--top_k", "--save_strategy sometimes", "--gloabl_batch_size 16"):
        with pytest.raises(ConfigError) as error:
            read_settings(wrong.split(), kinds)
        with pytest.raises(ConfigError, match=re.escape(str(error.value))):
            read_settings(wrong.split(), without_torch)


@pytest.fixture
def source_of(tmp_path, monkeypatch):
    """Reads the fields of a class whose body is this line, in a source of its own."""
    monkeypatch.syspath_prepend(tmp_path)

    def read(line: str, name: str = "GRPOConfig") -> Any:
        (tmp_path / "another").mkdir()
        (tmp_path / "another" / "__init__.py").touch()
        (tmp_path / "another" / "config.py").write_text(f"class {name}:\n    {line}\nclass Other:\n    other: int\n")
        monkeypatch.setattr(config_source, "_SOURCES", {"another/config.py": "GRPOConfig"})
        return config_source.fields_in_source.__wrapped__()

    return read


@pytest.mark.parametrize(
    ("line", "name", "error"),
    [
        ("size: int = field(default=SIZE)", "GRPOConfig", NameError),
        ("size: int = field(default=1, metadata={'choices': SIZES})", "GRPOConfig", NameError),
        ("size: int = dataclasses.field(default=1)", "GRPOConfig", NameError),
        ("size: int", "GRPOConfig", SyntaxError),
        ("size: int = field(default=1)", "Moved", KeyError),
    ],
)
def test_a_source_that_is_not_understood_is_not_read(source_of, line, name, error):
    with pytest.raises(error):
        source_of(line, name)


def test_a_plain_default_is_one_and_an_unknown_type_is_text(source_of):
    (size,) = fields(source_of("size: Sizes = 3"))
    assert (size.name, size.type, size.default) == ("size", str, 3)


def test_options_are_those_of_the_class_where_its_source_is_not_understood_or_it_is_loaded(monkeypatch):
    assert kinds_of_options()[1] is GRPOConfig
    # as before it is loaded; its import finds the module again
    monkeypatch.setattr("grpo_ext.tools.options.sys", SimpleNamespace(modules={}))
    assert kinds_of_options()[1] is config_source.fields_in_source()
    config_source.fields_in_source.cache_clear()
    monkeypatch.setattr(config_source, "_NAMES", {})
    assert kinds_of_options()[1] is GRPOConfig


@pytest.mark.full  # the libraries of a training run are imported
def test_a_command_whose_options_are_those_of_the_class_loads_it():
    unknown = "from grpo_ext.tools import config_source; config_source._NAMES = {}"
    assert "torch" in loaded_by(["plan"], first=unknown)


ENDS = f"""
import runpy, sys
script, *options = sys.argv[1:]
for option in options:
    sys.argv = [script, option]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print("ended:", end.code, *[name for name in {SLOW} if name in sys.modules])
"""


@pytest.mark.parametrize("recipe", ["grpo", "tools"])
def test_recipes_show_their_help_and_refuse_unknown_options_without_a_slow_library(recipe):
    script = forks.ROOT / "recipes" / f"{recipe}.py"
    command = [sys.executable, "-c", ENDS, str(script), "--help", "--max_stepz=3"]
    done = subprocess.run(command, capture_output=True, text=True)
    text, *statuses = re.split(r"^ended: ", done.stdout, flags=re.M)
    assert statuses == ["0\n", "2\n"], done.stderr
    assert "--sequence_mask_low" in text
    assert "did you mean --max_steps?" in done.stderr


@pytest.mark.parametrize("words", [["plan"], ["diff", "--help"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_difference_of_runs(words):
    """By click's output, and by rich's: the status is that of a program that SIGPIPE has ended."""
    gone, output = os.pipe()
    os.close(gone)
    done = subprocess.run([sys.executable, "-m", "grpo_ext.tools.cli", *words], stdout=output, stderr=subprocess.PIPE)
    os.close(output)
    assert (done.returncode, done.stderr) == (141, b"")


def test_lists_and_files_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="is not a list of positive integers"):
        integers("16,x", "sizes")
    with pytest.raises(ConfigError, match=r"No such file or directory: .*none.yaml"):
        read_settings(["--config", str(tmp_path / "none.yaml")])
    (tmp_path / "bad.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="must contain a YAML mapping"):
        read_settings(["--config", str(tmp_path / "bad.yaml")])


def test_settings_keep_their_types_and_options_override_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "another")
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-5\nlora_r: 4\nrewards: [a, b]\nuse_peft: true\nenv: {WANDB_PROJECT: mine}\n")
    given = read_settings(["--rewards", "c", "--conversational", "True", f"--config={file}", "--lora-r", "8"])
    assert given == {"learning_rate": 1e-5, "lora_r": 8, "rewards": ["c"], "use_peft": True, "conversational": True}
    assert os.environ["WANDB_PROJECT"] == "mine"
    assert read_settings([]) == {}


def test_one_text_in_a_file_is_a_list_of_one(tmp_path):
    (tmp_path / "run.yaml").write_text("rewards: exact_number\nallow_changed_on_resume: data\nrun_name: one\n")
    given = read_settings(["--config", str(tmp_path / "run.yaml")])
    assert given == {"rewards": ["exact_number"], "allow_changed_on_resume": ["data"], "run_name": "one"}


@pytest.fixture
def invoke(tmp_path):
    """Runs a command with a file of settings and options."""

    def run(command, content, *flags):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
        return runner.invoke(app, [command, "--config", str(tmp_path / "run.yaml"), *flags])

    return run


@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_misspelt_setting_is_refused(invoke, command):
    result = invoke(command, {"global_batchsize": 32, "rewards": ["exact_number"]})
    assert isinstance(result.exception, ConfigError)
    said = "--global_batchsize is not an option (in the file of --config); did you mean --global_batch_size?"
    assert str(result.exception) == said
    result = runner.invoke(app, [command, "--conversationl", "True"])
    assert str(result.exception) == "--conversationl is not an option; did you mean --conversational?"
    for own in {"plan": ["num_prompts"], "check": ["micro_batch_sizes", "json"]}[command]:
        result = runner.invoke(app, [command, f"--{own}s", "4"])
        assert f"did you mean --{own}?" in str(result.exception)


@pytest.fixture
def checked(monkeypatch, invoke):
    """Runs `grpo-ext check`; returns the run it would train, and the result of the command."""
    seen = {}

    def check(run, splits, folder, **options):
        seen.update(vars(run), dataset=load_from_disk(run.data_path), **options)
        raise ConfigError("stop here")

    monkeypatch.setattr("grpo_ext.tools.check.splits.check", check)
    monkeypatch.setattr("grpo_ext.tools.check.splits.find_model", lambda *names: None)
    return lambda content, *flags: (seen, invoke("check", content, *flags))


def test_a_check_takes_model_data_rewards_adapter_and_precision_of_the_run(checked, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n{"question": "2", "answer": "2"}\n')
    adapter = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    data = {"dataset_name": str(tmp_path / "data.jsonl"), "prompt_column": "question", "max_samples": 1}
    adapter["sequence_parallel_size"] = 2  # a size of a split
    written = {"output_dir": "out", "report_to": "wandb", "save_steps": 5, "logging_steps": 5, "eval_strategy": "steps"}
    file = {"model_name_or_path": "some/model", "beta": 0.1, "seed": 7, **data, **adapter, **written}
    options = ["--rewards", "exact_number", "length_penalty", "--max_completion_length", "32", "--lora_alpha", "8"]
    seen, result = checked(file, *options, "--steps", "2", "--attn_implementation", "eager")
    assert str(result.exception) == "stop here"
    assert (seen["model_path"], seen["steps"]) == ("some/model", 2)
    assert seen["dataset"]["prompt"] == ["1 + 1"]
    assert [f.__name__ for f in seen["rewards"]] == ["exact_number", "length_penalty"]
    assert seen["rewards"][1](completion_ids=[[0] * 16]) == [-0.5]  # of 32 tokens
    lora = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )  # TRL's default of dropout
    assert seen["peft"].to_dict() == lora.to_dict()
    loaded = seen["config"].pop("model_init_kwargs")
    assert loaded == {"revision": "main", "trust_remote_code": False, "attn_implementation": "eager"}
    expected = {"beta": 0.1, "seed": 7, "max_completion_length": 32, "bf16": False, "global_batch_size": 8}
    assert seen["config"] == {**expected, "rollout_chunk_size": 8}  # every split samples alike
    assert f"LoRA of rank 4; float32; without {', '.join(sorted(written))}" in result.output
    assert seen["quantization"] is None
    seen, _ = checked(file, "--model_name_or_path", "other/model", "--load_in_8bit", "True")  # an option wins
    assert (seen["model_path"], seen["quantization"].load_in_8bit) == ("other/model", True)
    seen, result = checked({**file, "bf16": True}, "--conversational", "True", "--system_prompt", "Add up.")
    messages = [{"role": "system", "content": "Add up."}, {"role": "user", "content": "1 + 1"}]
    assert seen["dataset"]["prompt"] == [messages]
    assert seen["config"]["bf16"] is True
    assert "bf16 as the settings say (--bf16 False: float32)" in result.output
    assert "the run itself" not in result.output


def test_a_check_refuses_half_a_task_and_names_the_demo(checked, monkeypatch):
    _, result = checked({"model_name_or_path": "some/model", "rewards": ["exact_number"]})
    assert "Only --model_name_or_path is set" in str(result.exception)
    rows = Dataset.from_dict({"prompt": ["ba>"]})
    task = SimpleNamespace(model_path="demo/model", train_dataset=rows, about="letters")
    monkeypatch.setattr("grpo_ext.demo.task.load_demo", lambda: task)
    load = {"dtype": "bfloat16", "attn_implementation": "eager"}
    seen, result = checked({"learning_rate": 0.5, **load, "output_dir": "out"})
    assert "Checking the demo: letters; all weights; float32; without dtype, output_dir" in result.output
    assert seen["config"]["model_init_kwargs"]["attn_implementation"] == "eager"
    assert (seen["model_path"], seen["peft"], seen["config"]["learning_rate"]) == ("demo/model", None, 0.5)
    assert [f.__name__ for f in seen["rewards"]] == ["sorted_letters_reward"]


def test_a_plan_of_the_demo_knows_its_prompts_and_needs_a_model_for_a_memory():
    assert "4096 prompts = 256 optimizer steps" in runner.invoke(app, ["plan", "--demo", "letters"]).stdout
    assert "100 prompts" in runner.invoke(app, ["plan", "--demo", "letters", "--num_prompts", "100"]).stdout
    result = runner.invoke(app, ["plan", "--demo", "letters", "--device_memory", "1"])
    assert "--device_memory are about a model; add --model_name_or_path" in str(result.exception)


def test_a_plan_takes_adapter_and_precision_from_the_file_of_the_run(tmp_path, invoke):
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForCausalLM"]}))

    def planned(content, *flags):
        result = invoke("plan", {"model_name_or_path": str(tmp_path / "config.json"), **content}, *flags)
        assert result.exit_code == 0, result.exception
        return result.output

    full, lora = planned({"beta": 0.0}), planned({"use_peft": True, "lora_r": 4})
    assert lora == planned({"beta": 0.0}, "--use_peft", "True", "--lora_r", "4") != full
    assert planned({"bf16": False}) == planned({"beta": 0.0}, "--bf16", "False") != full
    assert planned({"gradient_checkpointing": False}) != full
    assert "Largest micro-batch" in full
    assert "Largest micro-batch" in planned({"global_batch_size": 16384}, "--processes", "1024", "--engine", "fsdp2")


def test_a_plan_names_the_layout_and_the_exchange_of_processes_that_share_packs(tmp_path, invoke):
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **heads}))
    run = {"model_name_or_path": str(tmp_path / "config.json"), "max_completion_length": 28}
    flags = ["--processes", "4", "--prompt_length", "100", "--device_memory"]
    shared = invoke("plan", {**run, "sequence_parallel_size": 2}, *flags, "1").output
    assert "  processes               4, 2 for each micro-batch\n" in shared
    # half of 100 + 8 * 28 tokens, 192 numbers of 2 bytes each, of which half stay
    assert "in each layer and pass a device sends 30.4 KiB in two all-to-alls" in shared
    assert "Training fits 1 GB;" in shared
    alone = invoke("plan", run, *flags, "0.000001").output
    assert "  processes               4\n" in alone
    assert "Exchange" not in alone
    assert "with sequence_parallel_size=4, the largest that this run can have;" in alone
    refused = invoke("plan", {**run, "sequence_parallel_size": 2}, *flags, "1", "--engine", "zero3")
    assert "DeepSpeed (use FSDP2 or DDP)" in str(refused.exception)


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ("--global_batch_size 18 --rollout_batch_size 36", "Steps cut groups; advantages are still computed over"),
        ("--processes 8", "Only 4 of 8 processes sample."),
        ("--processes 4 --rollout_chunk_size 16", "Only 1 of 4 processes sample; rollout_chunk_size=4 uses more of"),
        (
            "--processes 2",
            "Sampled tokens depend on the number of processes; set rollout_chunk_size=8 to avoid",
        ),
        ("--per_device_train_batch_size 6", "Micro-batches of 6 cut groups, which rounds gradients; use a"),
        ("--num_prompts 9 --dataloader_drop_last True", "9 prompts = 2 optimizer steps, 1 prompt dropped"),
        ("--sampling_mask replay --top_k 5", "up to 5 ids per token"),
    ],
)
def test_a_plan_notes_what_is_seldom_meant_with_the_size_that_avoids_it(options, note):
    plan = "plan --num_generations 4 --global_batch_size 16 --per_device_train_batch_size 4"
    assert note in runner.invoke(app, f"{plan} {options}").stdout
    plain = runner.invoke(app, f"{plan} --bf16 False").stdout
    assert note not in plain
    assert "unknown (pass --num_prompts)" in plain
