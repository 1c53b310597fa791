"""A tiny model with its tokenizer and a data set on disk, and processes that see nothing of the test's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.tiny import prompts, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


def write_start(folder: Path) -> tuple[Path, Path]:
    """(folder of a model, folder of a data set) for a run of a few seconds."""
    model, data = folder / "model", folder / "data"
    tiny_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(json.dumps(row) for row in prompts(16)))
    return model, data


def environment(python_path: str | None = None) -> dict[str, str]:
    """That of this process, offline, with another PYTHONPATH or none."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FORCE_COLOR")}
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**inherited, **quiet} | ({} if python_path is None else {"PYTHONPATH": python_path})


def python(*arguments: object, cwd: Path, path: str | None = str(ROOT), interpreter: object = sys.executable) -> str:
    """What a Python process prints; fails with its error where it ends with one."""
    command = [str(argument) for argument in (interpreter, *arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment(path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout
