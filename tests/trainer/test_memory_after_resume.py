"""A resumed run takes no more memory than one that was not stopped: what was loaded is let go."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.forks import python

SCRIPT = Path(__file__).with_name("peak_memory.py")
MORE = 0.03  # of the peak, in processes of the same size; measured: up to 0.016


def measured(folder: Path, weights: str, lag: int, how: str) -> dict[str, float]:
    """In MiB: the peak memory of a process, and the state of its optimizer."""
    done = python(SCRIPT, folder, weights, lag, how)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / f"{how}.json").read_text())


@pytest.mark.parametrize(
    ("weights", "lag"),
    [("full", 1), *(pytest.param(*case, marks=pytest.mark.full) for case in (("full", 0), ("lora", 0), ("lora", 1)))],
)
def test_peak_memory_of_a_resumed_run(tmp_path, weights, lag):
    try:
        whole, resumed, held = (measured(tmp_path, weights, lag, how) for how in ("whole", "resumed", "held"))
    finally:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)  # half a gigabyte and more
    assert whole["optimizer"] == resumed["optimizer"] >= whole["peak"] / 5  # large enough to show
    assert resumed["peak"] <= (1 + MORE) * whole["peak"], f"{resumed['peak']:.0f} MiB, not {whole['peak']:.0f}"
    assert held["peak"] > (1 + MORE) * whole["peak"]  # what it is that would show
