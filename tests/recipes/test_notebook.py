"""The quickstart notebook: run again with fewer steps, its printed values checked; and what is committed is clean."""

import os
import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.drop_in import tool_tokenizer
from tests.support.tiny import tiny_model
from tests.support.toy_recipe import ROOT

NOTEBOOK = ROOT / "recipes" / "notebooks" / "quickstart.ipynb"
REAL_MODEL = NOTEBOOK.with_name("real_model.ipynb")


def printed(notebook):
    """All text that the cells wrote to stdout."""
    return "".join(o.text for cell in notebook.cells for o in cell.get("outputs", []) if o.get("name") == "stdout")


def check_values(text: str) -> None:
    """The claims of the notebook, on the numbers it printed."""
    rewards = re.search(r"reward of the first step (\d\.\d+), of the last (\d\.\d+)", text)
    first, last = map(float, rewards.groups())
    assert last > first + 0.2
    errors = {name: float(value) for name, value in re.findall(r"^(.+): update error (\S+)$", text, re.M)}
    assert set(errors) == {"micro-batch 5", "micro-batch 1", "another seed"}
    assert errors.pop("another seed") > 0.1, "the control has to differ"
    assert max(errors.values()) < 1e-4
    hashes = dict(re.findall(r"^micro-batch (\d+): parameters ([0-9a-f]{16})$", text, re.M))
    assert set(hashes) == {"32", "5"}
    assert len(set(hashes.values())) == 1
    assert "full checkpoint exported, the same weights" in text
    samples = re.findall(r"^([a-h]+)> ([a-h]*) (right|wrong)", text, re.M)
    assert len(samples) == 5
    # how many are right after so few steps is a matter of the machine, whose rounding the warm start has
    assert all((verdict == "right") == (answer == "".join(sorted(word))) for word, answer, verdict in samples), samples
    assert "right" in [verdict for _, _, verdict in samples], samples


def run(path, folder, **environment):
    """The notebook after a run of its own in a temporary folder."""
    notebook = nbformat.read(path, as_version=4)
    with pytest.MonkeyPatch.context() as patch:  # the kernel inherits the environment
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        for name, value in environment.items():
            patch.setenv(name, str(value))
        NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


@pytest.mark.full
def test_it_runs_prints_what_it_says_and_shows_a_plot(cache, tmp_path):
    executed = run(NOTEBOOK, tmp_path, GRPO_EXT_CACHE=cache, STEPS=22)
    check_values(printed(executed))
    images = [o for cell in executed.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(images) == 1


def test_the_committed_outputs_are_of_a_whole_run():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    check_values(printed(notebook))


@pytest.mark.full
def test_the_second_part_runs_with_any_chat_model(tmp_path):
    model, tokenizer = tiny_model(), tool_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "chat")
    text = printed(run(REAL_MODEL, tmp_path, MODEL=tmp_path / "chat", STEPS=1))
    assert "[1.0, 0.2, 0.0]" in text, "the reward of the three examples"
    assert re.search(r"reward of the first step \d\.\d+, of the last \d\.\d+", text)
    assert text.count("before: ") == text.count("after: ") == 6


def test_the_second_part_was_run_with_the_real_model_and_it_learned():
    notebook = nbformat.read(REAL_MODEL, as_version=4)
    text = printed(notebook)
    assert "SmolLM2-135M-Instruct" in text
    first, last = map(float, re.search(r"reward of the first step (\d\.\d+), of the last (\d\.\d+)", text).groups())
    assert last > first + 0.3


@pytest.mark.parametrize("path", [NOTEBOOK, REAL_MODEL], ids=lambda path: path.stem)
def test_the_committed_outputs_hold_no_traceback_no_path_and_no_warning(path):
    text = path.read_text()
    outputs = [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", [])]
    assert all(o.output_type != "error" for o in outputs)
    assert not [o for o in outputs if o.get("name") == "stderr"]
    assert "Traceback" not in text
    shown = "\n".join(o.get("text") or str(o.get("data", {}).get("text/plain")) for o in outputs)
    assert not re.search(r"(?<![\w<])/(?:\w+/)+|[A-Z]:\\", shown), "an absolute path"
    assert "arning" not in shown
    assert path.stat().st_size < 100_000
