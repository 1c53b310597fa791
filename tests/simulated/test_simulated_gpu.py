"""Training on a simulated CUDA device: no operator mixes devices, and the host waits and copies no more than it has to.

What runs here is not a GPU: kernels are the CPU's, and nothing is timed (see device.py).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROUNDING = 1e-6  # of a sum of weights: CUDA takes some operators apart in another way

CASES: dict[str, dict[str, Any]] = {
    "packed": {"settings": {"forward": "packed"}},
    "prefix": {"settings": {"forward": "prefix"}},
    "padded": {"settings": {"forward": "padded"}},
    "reference and two iterations": {"settings": {"beta": 0.1, "num_iterations": 2}},
    "masked completions": {"settings": {"mask_truncated_completions": True, "top_entropy_quantile": 0.5}},
    "entropy bonus": {"settings": {"entropy_coef": 0.01, "importance_sampling_level": "sequence"}},
    "token budget": {"settings": {"micro_batch_tokens": 100}},
    "filters": {"settings": {"top_p": 0.9, "min_p": 0.02, "top_k": 20, "repetition_penalty": 1.1}},
    "checkpointing": {"settings": {"gradient_checkpointing": True}},
    "evaluation": {"settings": {}, "evaluate": True},
    "lora": {"settings": {"beta": 0.1}, "lora": True},
    "gpt2": {"settings": {}, "model": "gpt2"},
    "moe": {"settings": {"router_aux_loss_coef": 0.1}, "model": "moe"},
    "bitwise": {"settings": {"bitwise_invariant": True, "top_p": 0.9}},
    "bitwise moe": {"settings": {"bitwise_invariant": True, "router_aux_loss_coef": 0.1}, "model": "moe"},
    "bitwise, other filters": {
        "settings": {"bitwise_invariant": True, "generation_kwargs": {"typical_p": 0.9, "top_h": 0.5}}
    },
}
DEFAULT = ("packed", "lora", "bitwise moe")


@functools.cache
def run(case: str, device: str = "cuda:0") -> dict[str, Any]:
    """What tests/simulated/train.py prints for a case."""
    env = {**os.environ, "ACCELERATE_TORCH_DEVICE": device, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.simulated.train", case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def by_part(kind: str) -> tuple[float, float]:
    """What packs of 4 of the 16 completions need: for each micro-batch, and for the rest of a step."""
    case = CASES["packed"]
    four, one = (sum(run(json.dumps(case | {"micro_batch": size}))["steps"][-1][kind].values()) for size in (4, 16))
    each = (four - one) / 3
    return each, one - each


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.full) for n in CASES])
def test_no_operator_mixes_devices_or_is_refused(name):
    result = run(json.dumps(CASES[name]))
    assert result["mixed"] == []
    assert result["refused"] == []
    assert len(result["steps"]) == 3
    assert all(step["launches"] for step in result["steps"])


def test_what_is_wrong_is_found():
    planted = {**CASES["bitwise"], "planted": True}
    result = run(json.dumps(planted))
    assert [line.split()[0] for line in result["mixed"]].count("add")
    assert [line.split()[0] for line in result["refused"]].count("cumsum")


def test_the_device_computes_what_the_cpu_does():
    one, other = (run(json.dumps(CASES["packed"]), device)["weights"] for device in ("cuda:0", "cpu"))
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < ROUNDING


# blocking copies and waits of the host, of packs without images; measured, and never more
CEILINGS = {"to_device": (18, 19), "to_host": (0, 1), "waits": (0, 79)}  # of a micro-batch, of the rest of a step


@pytest.mark.parametrize("kind", CEILINGS)
def test_the_host_waits_and_copies_no_more_than_this(kind):
    micro_batch, rest = by_part(kind)
    most, most_of_rest = CEILINGS[kind]
    assert micro_batch <= most
    assert rest <= most_of_rest


def test_another_copy_in_every_forward_is_found():
    case = CASES["packed"] | {"micro_batch": 4}
    plain, planted = (run(json.dumps(case | more))["steps"][-1]["to_device"] for more in ({}, {"planted": True}))
    assert sum(planted.values()) >= sum(plain.values()) + 4
