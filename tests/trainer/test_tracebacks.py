"""The traceback of a deliberate error: the frames of the user alone, those of a reward function too."""

import re
import sys
import traceback

import nbformat
import pytest
from nbclient import NotebookClient
from transformers import Trainer
from trl.rewards import think_format_reward

from grpo_ext.errors import ConfigError, GrpoExtError, RewardError
from tests.support.failing import failing
from tests.support.forks import ROOT, python
from tests.support.trainers import make
from tests.trainer.mistakes import MISTAKES, run

INSIDE = ("site-packages/", "grpo_ext/trainer.py", "grpo_ext/config.py")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_sentence_and_the_frames_of_the_user(name, tmp_path):
    settings, sentence = MISTAKES[name]
    with pytest.raises(GrpoExtError) as caught:
        run(tmp_path, **settings)
    shown = "".join(traceback.format_exception(caught.value))
    assert sentence in shown.splitlines()[-1]
    assert not any(path in shown for path in INSIDE), shown
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames == [sys._getframe().f_code.co_name, "run"]
    assert ("[0].score" in shown) == ("failing" in name), "the traceback of a reward function stays"


ENTRIES = {
    "evaluate": lambda trainer: trainer.evaluate(),
    "predict": lambda trainer: trainer.predict(None),
    "rerun": lambda trainer: trainer.rerun(1),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_other_methods_than_train_end_in_the_frames_of_the_user_too(name, tmp_path):
    trainer = make(tmp_path / "out")
    with pytest.raises(ConfigError) as caught:
        ENTRIES[name](trainer)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames == [sys._getframe().f_code.co_name, "<lambda>"]


def test_what_is_put_in_place_of_transformers_method_later_runs(tmp_path, monkeypatch):
    trainer = make(tmp_path / "out")
    monkeypatch.setattr(Trainer, "evaluate", lambda self, *args, **kwargs: "another")
    assert trainer.evaluate() == "another"


def test_the_traceback_of_a_reward_function_in_a_process_of_its_own_stays(tmp_path):
    with pytest.raises(GrpoExtError) as caught:
        run(tmp_path, reward=failing, reward_workers=1)
    assert "[0].score" in "".join(traceback.format_exception(caught.value))


def circular(completions, **_):
    first = KeyError("first")
    try:
        raise first
    except KeyError:
        second = ValueError("second")
        second.__context__ = None
        first.__context__ = second
        raise second from first


def endless(completions, **columns):
    return endless(completions, **columns)


@pytest.mark.parametrize(
    ("reward", "settings", "shown"),
    [
        (circular, {}, "second"),
        (endless, {"reward_timeout": 60.0}, "RecursionError"),
        (think_format_reward, {}, "format_rewards.py"),  # all frames are TRL's: the innermost stays
    ],
)
def test_odd_causes_of_a_reward_error(tmp_path, reward, settings, shown):
    with pytest.raises(RewardError) as caught:
        run(tmp_path, reward=reward, **settings)
    assert shown in "".join(traceback.format_exception(caught.value))


def ended(name, folder, **variables):
    """What a process shows below the frames of runpy, whether it was forked or not."""
    done = python("-m", "tests.trainer.mistakes", name, folder, **variables)
    assert done.returncode == 1
    return done.stderr[done.stderr.index("Traceback") :].rpartition("runpy>")[2]


def test_a_script_shows_its_own_lines_and_a_variable_brings_back_all(tmp_path):
    shown = ended("a column", tmp_path / "a")
    assert not any(path in shown for path in INSIDE), shown
    assert re.findall(r'File ".*/(\w+)\.py", line \d+, in (\S+)', shown) == [
        ("mistakes", "<module>"),
        ("mistakes", "run"),
    ]
    whole = ended("a column", tmp_path / "b", GRPO_EXT_TRACEBACK="full")
    assert "grpo_ext/trainer.py" in whole
    assert whole.splitlines()[-1] == shown.splitlines()[-1]


CELL = "from grpo_ext import GRPOConfig\n\nGRPOConfig('out', global_batchsize=8)"


def check_cell(shown):
    assert "did you mean 'global_batch_size'?" in shown.splitlines()[-1]
    assert "GRPOConfig('out', global_batchsize=8)" in shown.replace("\x1b[39m", "") or "line 3" in shown
    assert not any(path in shown for path in INSIDE), shown


def test_a_cell_shows_itself_and_the_sentence(tmp_path):
    script = tmp_path / "shell.py"
    script.write_text(f"from IPython import InteractiveShell\nInteractiveShell(colors='nocolor').run_cell({CELL!r})")
    check_cell(python(script, IPYTHONDIR=str(tmp_path)).stdout.strip())


@pytest.mark.full  # a kernel that imports the libraries
def test_a_notebook_shows_the_cell_and_the_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}).execute()
    [shown] = [output.traceback for output in notebook.cells[0].outputs if output.output_type == "error"]
    check_cell("\n".join(shown))
