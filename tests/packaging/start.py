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


def call(*arguments: object, cwd: Path, path: str | None = None, program: object = sys.executable) -> str:
    """What a process prints that has this PYTHONPATH, or none; fails with its error where it ends with one."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FORCE_COLOR")}
    env = {**inherited, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {} if path is None else {"PYTHONPATH": path}
    command = [str(argument) for argument in (program, *arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout
