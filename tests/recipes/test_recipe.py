"""recipes/grpo.py as people run it: a process of its own, from another folder, without a network."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, TrainerState

from grpo_ext.demo.task import load_demo
from grpo_ext.errors import ConfigError
from grpo_ext.run.checkpoint import checkpoints
from tests.support import forks
from tests.support.drop_in import tool_tokenizer
from tests.support.launch import environment as launch_environment
from tests.support.launch import two_processes
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.toy_recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"
ONE_STEP = ["--max_steps", "1", "--num_generations", "2", "--global_batch_size", "4", "--report_to", "none"]
SMALL = ["--global_batch_size", "16", "--per_device_train_batch_size", "16"]  # where the demo need not learn


# as `make train` has it: what a user types, and nothing that Accelerate remarks upon
LAUNCHER = "-m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"


def run_recipe(folder: Path, cache: Path, *options: Any, expect: int = 0) -> subprocess.CompletedProcess[str]:
    result = forks.python(RECIPE, *options, cwd=folder, timeout_s=400, GRPO_EXT_CACHE=str(cache))
    assert result.returncode == expect, f"{options}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    return result


def run_by_accelerate(folder: Path, cache: Path, fork: bool, *options: Any) -> subprocess.CompletedProcess[str]:
    """Through `accelerate launch`, on a forked process or in interpreters of its own."""
    launcher, command = [sys.executable, *LAUNCHER.split()], [str(RECIPE), *map(str, options)]
    environment = launch_environment()
    fork = fork and forks.serves(environment)
    environment |= {"GRPO_EXT_CACHE": str(cache)}
    if fork:
        done = forks.run_forked_by(launcher, command, environment, 400, folder)
        result = subprocess.CompletedProcess(command, *done)
    else:
        environment |= {"PYTHONPATH": str(RECIPE.parents[1]), "HF_HOME": str(cache / "hub")}
        command, streams = [*launcher, *command], {"capture_output": True, "text": True}
        result = subprocess.run(command, cwd=folder, env=environment, timeout=400, **streams)
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    return result


@pytest.fixture
def launch(tmp_path, cache):
    """Runs the recipe in tmp_path; the result has returncode, stdout and stderr."""
    return functools.partial(run_recipe, tmp_path, cache)


@pytest.fixture(scope="module")
def by_accelerate(cache, request):
    """Runs the recipe in a folder through `accelerate launch`; with --full in interpreters of its own."""
    fork = not request.config.getoption("--full")
    return lambda folder, *options: run_by_accelerate(folder, cache, fork, *options)


@pytest.fixture
def recipe(monkeypatch):
    module = load_recipe()
    monkeypatch.setattr(module, "quiet_libraries", lambda: None)  # it would last beyond this test
    return module


@pytest.fixture
def own_task(tmp_path):
    """Options for a random tiny model and a small local data set."""
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    rows = [{"question": "cab>"[n % 3 :], "solution": f"#### {n}"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    names = ["--model_name_or_path", model, "--dataset_name", tmp_path / "rows.jsonl"]
    columns = ["--prompt_column", "question", "--answer_column", "solution", "--answer_after", "####"]
    return [*names, *columns, *ONE_STEP, "--bf16", "False", "--max_completion_length", "4"]


# a minute and more, from the model that users get; `make test` shows an adapter's gain in 20 steps from that of a
# shorter warm start (conftest.py)
@pytest.mark.full
def test_demo_learns_from_below_035_to_above_090_and_says_where_it_saved(by_accelerate, tmp_path, cache, monkeypatch):
    monkeypatch.setenv("GRPO_EXT_CACHE", str(cache))
    result = by_accelerate(tmp_path)
    scores = re.search(r"^held-out exact match (\d\.\d+) -> (\d\.\d+) in \d+ s$", result.stdout, re.M)
    assert scores, result.stdout
    before, after = float(scores[1]), float(scores[2])
    assert 0.1 < before < 0.35
    assert after >= 0.9
    folder = tmp_path / "runs" / "demo-1"
    assert f"Saved in {folder.relative_to(tmp_path)}" in result.stdout
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["exact_match_after"] == pytest.approx(after, abs=0.005)
    assert not list(folder.glob("checkpoint-*"))
    saved, _ = load_recipe().HeldOut(load_demo(), 8).answers(AutoModelForCausalLM.from_pretrained(folder))
    assert saved == pytest.approx(metrics["exact_match_after"], abs=0.01), "the saved model is not the trained one"


SAVES = ["--save_steps", "1", "--logging_steps", "1", "--demo_eval_every", "1"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def demos(tmp_path_factory, cache, by_accelerate):
    """The folder of an empty "demo-1" and two demos, the files of the first of both before and after the second, and
    what that one printed."""
    folder = tmp_path_factory.mktemp("demos")
    (folder / "runs" / "demo-1").mkdir(parents=True)
    run_recipe(folder, cache, *SMALL, *SAVES, "--max_steps", "1")
    before = contents(folder / "runs" / "demo-2")
    second = by_accelerate(folder, *SMALL, *SAVES, "--max_steps", "2")
    return folder, (before, contents(folder / "runs" / "demo-2")), second


def test_a_second_demo_never_overwrites_and_the_console_stays_quiet(demos):
    folder, (before, after), second = demos
    assert before == after != {}
    assert list((folder / "runs" / "demo-1").iterdir()) == []
    assert (folder / "runs" / "demo-3" / "model.safetensors").is_file()
    assert len(re.findall(r"^step +\d/2 .*held out exact match 0\.\d\d +reward", second.stdout, re.M)) == 2
    assert "{'" not in second.stdout, "a dictionary was dumped"
    # forked processes have loaded them
    assert second.stderr.removeprefix("Loading torch, transformers and TRL ...\n") == ""


@pytest.mark.full
def test_a_demo_that_is_resumed_goes_on_in_its_folder(demos, cache):
    """By its path, and by "auto", which means the newest demo, as "latest" does."""
    folder, _, _ = demos
    longer = [*SMALL, *SAVES, "--allow_changed_on_resume", "max_steps", "--max_steps"]
    run_recipe(folder, cache, *longer, "2", "--resume_from_checkpoint", "runs/demo-2/checkpoint-1")
    result = run_recipe(folder, cache, *longer, "3", "--resume_from_checkpoint", "auto")
    assert "Next, the same run on two processes" not in result.stdout
    metrics = json.loads((folder / "runs" / "demo-3" / "metrics.json").read_text())
    for curve in ("exact_match_by_step", "seconds_by_step"):
        assert list(metrics[curve]) == ["0", "1", "2", "3"]  # of all starts that ended
    saved = {path.name: [c.name for c in checkpoints(path)] for path in (folder / "runs").iterdir()}
    names = [f"checkpoint-{n}" for n in (1, 2, 3)]
    assert saved == {"demo-1": [], "demo-2": names[:2], "demo-3": names}


@pytest.mark.parametrize(
    ("name", "rewards", "steps", "gain"),
    [
        pytest.param("lora", ["sorted_letters_reward"], 20, 0.3, marks=pytest.mark.full),
        pytest.param("two_rewards", ["sorted_letters_reward", "length_penalty"], 1, None, marks=pytest.mark.full),
        ("custom_reward", ["share_in_place"], 1, None),
    ],
)
def test_the_demo_takes_adapters_and_other_rewards(launch, tmp_path, name, rewards, steps, gain):
    (tmp_path / "recipes").symlink_to(RECIPE.parent)  # the reward's path is one from the root of the project
    sizes = SMALL if gain is None else []
    launch("--config", f"recipes/configs/demo_{name}.yaml", *sizes, "--max_steps", steps, "--logging_steps", "1")
    folder = tmp_path / "runs" / "demo-1"
    metrics = json.loads((folder / "metrics.json").read_text())
    logged = {key for line in metrics["log_history"] for key in line if key.startswith("rewards/")}
    assert logged == {f"rewards/{reward}/{what}" for reward in rewards for what in ("mean", "std")}
    assert (folder / ("adapter_model.safetensors" if name == "lora" else "model.safetensors")).is_file()
    if gain is not None:
        assert 0.1 < metrics["exact_match_before"] < 0.35  # also after the shorter warm start
        assert metrics["exact_match_after"] >= metrics["exact_match_before"] + gain


@pytest.mark.full
def test_a_step_runs_again_with_the_settings_of_the_run(launch, own_task, tmp_path):
    saves = ["--max_steps", "3", "--save_strategy", "steps", "--save_steps", "2"]
    launch(*own_task, *saves, "--output_dir", tmp_path / "run")
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    (tmp_path / "settings.yaml").write_text(json.dumps(recipe["settings"]))
    again = ["--config", tmp_path / "settings.yaml", "--output_dir", tmp_path / "run", "--rerun", "3"]
    cases = ["--rerun_gradients", "True", "--rerun_cases", "epsilon=0.01", "loss_type=dr_grpo,reward_weights=-2"]
    output = launch(*again, "--per_device_train_batch_size", "1", *cases).stdout
    assert re.search(r"Running step 3 .* from checkpoint-2, about \d+ s", output)
    assert re.search("step 3: the same (bits|up to rounding)", output)
    page = tmp_path / "run" / "rerun" / "step-3" / "report" / "index.html"
    assert f"Report: {page}" in output
    assert "step 3" in page.read_text()
    for case in ("epsilon=0.01", "loss_type=dr_grpo, reward_weights=[-2.0]"):  # no group has variance
        sentence = f"{case}: no difference: gradient and update are the same in this step"
        assert sentence in output
        assert sentence in page.read_text()
    assert "no step 9" in launch(*again[:-1], "9", expect=2).stderr
    assert "did you mean 'epsilon'?" in launch(*again, "--rerun_cases", "epsilno=0.01", expect=2).stderr


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("entropy_coef=-1e-3", {"entropy_coef": -1e-3}),
        ("reward_weights=1,-2,epsilon=0.3", {"reward_weights": [1.0, -2.0], "epsilon": 0.3}),
        ("trust_region=None,scale_rewards=True", {"trust_region": None, "scale_rewards": True}),
        ("reward_weights=None,skip_zero_contribution=False", {"reward_weights": None, "skip_zero_contribution": False}),
        ("advantage_estimator=None,epsilon_high=None", {"advantage_estimator": None, "epsilon_high": None}),
        ("scale_rewards=none", {"scale_rewards": "none"}),
        ("loss_type=True", {"loss_type": "True"}),  # which is refused as an unknown loss, not as a number
        (
            "reward_weights=1e-3,-1e-3,epsilon=0.3, beta=1",
            {"reward_weights": [1e-3, -1e-3], "epsilon": 0.3, "beta": 1.0},
        ),
        ("max_grad_norm=None", {"max_grad_norm": None}),
    ],
)
def test_a_case_is_read_as_options_are(recipe, text, case):
    read = recipe.read_case(text)
    assert read == case
    assert [*read] == [*case]  # the title has the order of the text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epsilon", "--case epsilon: write NAME=VALUE"),
        ("epsilon 0.3", "--case epsilon 0.3: write NAME=VALUE"),
        ("epsilom=1", "--case epsilom: did you mean 'epsilon'"),
        ("epsilon=a", "--case epsilon=a: .*invalid float value"),
        ("epsilon=0.1,0.2", "--case epsilon=0.1,0.2: the setting takes one value"),
    ],
)
def test_a_case_that_cannot_be_read_says_how_it_is_written(recipe, text, message):
    with pytest.raises(ConfigError, match=message):
        recipe.read_case(text)


def test_a_case_that_names_a_setting_twice_is_refused(recipe):
    with pytest.raises(ConfigError, match="names a setting twice; write two cases"):
        recipe.read_case("epsilon=0.1,beta=0.1,epsilon=0.2")


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        (["--demo", "letters"], "no"),
        (["--save_steps", "10"], "steps"),
        (["--demo", "sums", "--save_steps", "10"], "steps"),
        (["--save_steps", "10", "--save_strategy", "no"], "no"),
    ],
)
def test_a_demo_saves_checkpoints_where_save_steps_is_set(recipe, options, strategy):
    _, _, training, _ = recipe.parse([*options, "--output_dir", "out"])
    assert training.save_strategy == strategy


def test_the_console_of_a_rerun_counts_to_its_step_and_shows_what_the_run_logged(recipe, capsys):
    console, state = recipe.RerunConsole(12), TrainerState(max_steps=150, logging_steps=5)
    console.on_train_begin(None, state, None)
    for state.global_step in range(1, 13):
        console.on_log(None, state, None, logs={"reward": 0.5})
    assert re.findall(r"^step +(\S+)", capsys.readouterr().out, re.M) == ["5/12", "10/12", "12/12"]


@pytest.mark.full  # half a minute: two processes that import the libraries
def test_a_step_runs_again_on_another_number_of_processes(launch, own_task, tmp_path):
    launch(*own_task, "--max_steps", "2", "--output_dir", tmp_path / "run")
    command = [sys.executable, "-m", "grpo_ext.tools.cli", "rerun", "run", "--step", "2", "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": str(RECIPE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search("steps 1 to 2: the same (bits|up to rounding)", done.stdout)


def test_folder_with_checkpoints_is_refused_before_loading_and_the_resume_it_names_works(launch, own_task, tmp_path):
    """The folder comes from a file, whose rewards the options override."""
    (tmp_path / "run.yaml").write_text("output_dir: out\nsave_steps: 1\nrewards: [exact_number]\n")
    options = ["--config", "run.yaml", *own_task, "--rewards", "length_penalty"]
    assert "Saved in out" in launch(*options).stdout
    history = json.loads((tmp_path / "out" / "metrics.json").read_text())["log_history"]
    assert any("rewards/length_penalty/mean" in entry for entry in history)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert (tmp_path / "out" / "checkpoint-1").is_dir()
    (tmp_path / "model").rename(tmp_path / "gone")  # nothing may be loaded before the refusal
    refused = launch(*options, expect=2)
    assert refused.stderr.startswith("error: --output_dir out already holds 1 checkpoint, the last checkpoint-1")
    assert len(refused.stderr.splitlines()) == 1
    remedy = re.search(r"`(--resume_from_checkpoint) (\S+)`", refused.stderr)
    assert remedy, refused.stderr
    (tmp_path / "gone").rename(tmp_path / "model")
    longer = [*options, *remedy.groups(), "--max_steps", "2"]
    assert "allow_changed_on_resume=['max_steps']" in launch(*longer, expect=2).stderr
    launch(*longer, "--allow_changed_on_resume", "max_steps")
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset_name", "x.jsonl"], r"Only --dataset_name is set; set both"),
        (["--config", "none.yaml"], r"--config: .*No such file or directory: 'none.yaml'"),
        (["--global_batch_size", "12"], r"global_batch_size=12"),
        (["--max_steps", "abc"], r"--max_steps/--max-steps: invalid int value: 'abc'; `--help` lists the options"),
        (["--resume_from_checkpoint", "gone"], r"--resume_from_checkpoint gone does not exist"),
        (["--demo", "sum"], r"--demo sum is not a demo; use letters, or path/to/file.py:name of a Demo"),
        (["--demo", f"{RECIPE.with_name('smollm2.py')}:WORDS"], r"defines no Demo WORDS; it defines sums, last_word"),
        (["--demo", "gone.py:sums"], r"--demo gone.py:sums cannot be loaded \(.*No such file"),
        (["--demo", "letters", "--dataset_name", "rows.jsonl"], r"--demo letters has its own data"),
        (["--demo", "letters", "--model_name_or_path", "m"], r"--demo letters builds its own model"),
        (["--demo_trainer", "TRL"], r"--demo_trainer TRL is unknown; use grpo_ext or trl"),
    ],
)
def test_bad_input_ends_with_one_clear_line_and_status_2(recipe, options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        recipe.main(options)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert re.search(message, printed), printed
    assert printed.startswith("error: ")
    assert len(printed.splitlines()) == 1


def test_an_error_that_nobody_foresaw_keeps_its_traceback(recipe, own_task, tmp_path, monkeypatch, capsys):
    def load(*args: Any) -> None:
        {}["x"]

    monkeypatch.setattr(recipe, "load_prompts", load)
    with pytest.raises(SystemExit):
        recipe.main([*map(str, own_task), "--output_dir", str(tmp_path / "out")])
    printed = capsys.readouterr().err
    assert "in load" in printed.split("error: process 0 failed: KeyError: 'x'")[0]


RESUMED = ["--resume_from_checkpoint", "run/checkpoint-1", "--seed", "7"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (RESUMED, r"belongs to another run:\n  seed: 42 in the"),
        (["--prompt_column", "nothing"], r"not in the dataset.*in the data of .*prompt_column='nothing'"),
    ],
)
def test_two_processes_say_an_error_once_without_a_traceback(launch, own_task, tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    if "--seed" in options:
        launch(*own_task, "--output_dir", "run", "--save_steps", "1")
    options = [re.sub(r"^(?=run/)", f"{tmp_path}/", option) for option in options]  # a launch may begin elsewhere
    status, output = two_processes(RECIPE, *map(str, own_task), "--output_dir", str(tmp_path / "out"), *options)
    assert status
    ours = re.split(r"\n[EW]\d+ .*torch/distributed/elastic", output)[0]  # before the launcher's own report
    assert re.search(says, ours), output[-3000:]
    assert ours.count("error: ") == 1, ours
    assert "Traceback" not in ours


@pytest.mark.full
def test_the_problems_of_the_real_model_train_another_chat_model_with_either_trainer(launch, tmp_path):
    model, tokenizer = tiny_model(), tool_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    options = ["--model_name_or_path", tmp_path / "chat", *ONE_STEP, "--per_device_train_batch_size", "4"]
    for name, trainer in (("sums", "grpo_ext"), ("last_word", "trl")):
        folder = tmp_path / f"runs-{name}"
        demo = ["--demo", name, "--demo_trainer", trainer, "--demo_eval_every", "1", "--output_dir", folder]
        result = launch(*options, *demo, "--max_completion_length", "4")
        assert f"{tmp_path / 'chat'}" in result.stdout.split("Before, ")[0]
        assert result.stdout.count("held-out exact match 0.00") >= 2
        metrics = json.loads((folder / "metrics.json").read_text())
        assert metrics["exact_match_by_step"] == {"0": 0.0, "1": 0.0}
        assert 0.0 < metrics["seconds_by_step"]["1"] <= metrics["seconds"]
