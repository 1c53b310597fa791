"""An uncaught error in a script: its sentence and the frames of the script, not those of the libraries."""

import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from grpo_ext.errors import GrpoExtError
from grpo_ext.runtime.uncaught import of_the_user
from tests.support.launch import ROOT, environment
from tests.trainer.mistakes import MISTAKES, run

INSIDE = ("site-packages/", "grpo_ext/trainer.py", "grpo_ext/config.py", "/runpy.py")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_sentence_and_the_frames_of_the_user(name, tmp_path):
    settings, sentence = MISTAKES[name]
    with pytest.raises(GrpoExtError) as caught:
        run(tmp_path, **settings)
    shown = of_the_user(caught.value)
    assert sentence in shown.splitlines()[-1]
    assert not any(path in shown for path in INSIDE), shown
    assert shown.count('File "') == (3 if "failing" in name else 2)  # the test, `run`, and the reward function
    assert ("[0].score" in shown) == ("failing" in name), "the traceback of a reward function stays"


def ended(name, folder, **variables):
    command = [sys.executable, "-m", "tests.trainer.mistakes", name, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    return done.stderr[done.stderr.index("Traceback") :]


def test_a_script_shows_its_own_lines_and_a_variable_brings_back_all(tmp_path):
    shown = ended("a column", tmp_path / "a")
    assert not any(path in shown for path in INSIDE), shown
    assert len(shown.splitlines()) <= 8
    whole = ended("a column", tmp_path / "b", GRPO_EXT_TRACEBACK="full")
    assert "grpo_ext/trainer.py" in whole
    assert whole.splitlines()[-1] == shown.splitlines()[-1]


def test_a_notebook_shows_the_cell_and_the_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cell = nbformat.v4.new_code_cell("from grpo_ext import GRPOConfig\n\nGRPOConfig('out', global_batchsize=8)")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}).execute()
    [shown] = [output.traceback for output in notebook.cells[0].outputs if output.output_type == "error"]
    assert "did you mean 'global_batch_size'?" in shown[-1]
    assert len(shown) <= 5
    assert "line 3" in shown[1]


def test_errors_of_others_are_shown_as_python_shows_them(monkeypatch):
    seen = []
    from grpo_ext.runtime import uncaught

    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error))
    uncaught.show_sentences()
    error = KeyError("x")
    sys.excepthook(KeyError, error, None)
    assert seen == [(KeyError, error, None)]
