"""The scripts of docs/upstream.md about the split show what they say, with a tiny model in the place of the hub's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment
from tests.support.tiny import tiny_model, tiny_tokenizer

SCRIPTS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "upstream.md").read_text(), re.DOTALL)
pytestmark = pytest.mark.full


def printed(folder: Path, number: int, kind: str = "qwen2", processes: int = 1) -> list[str]:
    """The lines of a script's output that are not the trainer's."""
    tiny_model(kind).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    path = folder / "script.py"
    path.write_text(re.sub(r'"trl-internal-testing/[^"]*"', repr(str(folder / "model")), SCRIPTS[number]))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    env = environment(ACCELERATE_USE_CPU="1", OMP_NUM_THREADS="1")
    command = [sys.executable, *launch, str(path)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if re.match(r"\(|\d|[a-z_]+ \d", line)]


def norms(line: str) -> list[float]:
    return [float(word) for word in line.split()[1:]]


@pytest.mark.parametrize(("number", "kind", "apart"), [(0, "qwen2", 0.05), (1, "moe", 1e-3)])
def test_the_gradient_depends_on_how_a_step_is_cut(tmp_path, number, kind, apart):
    (whole,), (cut,) = (norms(line) for line in printed(tmp_path, number, kind))
    assert whole > 0
    assert abs(cut / whole - 1) > apart


def test_completions_depend_on_the_number_of_processes(tmp_path):
    # two processes may write into one line
    found = ("".join(printed(tmp_path, 2, processes=processes)) for processes in (1, 2))
    alone, two = (sorted(re.findall(r"\('.', \[[^]]*\]\)", text)) for text in found)
    assert len(alone) == len(two) == 8
    assert alone != two


def test_which_losses_would_pass(tmp_path):
    for line in printed(tmp_path, 3):
        four, one = norms(line)
        assert (abs(one / four - 1) > 1e-4) == line.startswith("bnpo"), line
