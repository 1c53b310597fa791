"""The README's two commands in a fresh clone: everything they need, they set up themselves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full  # installs the dependencies again, two minutes and a package index
def test_the_two_commands_of_the_readme_work_in_a_fresh_clone(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTUAL_ENV", "PYTEST", "HF_", "OMP_"))}

    def make(*args: str) -> str:
        done = subprocess.run(["make", *args], cwd=clone, env=keep, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    trained = make("train", "ARGS=--max_steps 30")
    assert "held-out exact match 0." in trained
    assert (clone / "runs" / "demo-1" / "model.safetensors").exists()
    assert "passed" in make("test", "ARGS=tests/unit/batching/test_sizes.py")
