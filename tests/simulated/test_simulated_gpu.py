"""A simulated CUDA device: no operator mixes devices, and the host waits and copies no more than it has to.

What runs here is not a GPU: kernels are the CPU's, and nothing is timed (see device.py).
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.support.forks import python

ROUNDING = 1e-6  # of a sum of weights: CUDA takes some operators apart in another way

FILTERS = {"top_p": 0.9, "min_p": 0.02, "top_k": 20, "repetition_penalty": 1.1}
BUDGET = {"micro_batch_tokens": 100, "entropy_coef": 0.01, "gradient_checkpointing": True}
PADDED = {"forward": "padded", "mask_truncated_completions": True, "top_entropy_quantile": 0.5}
WINDOWS = {"settings": {"forward": "packed"}, "model": "mistral", "shape": {"sliding_window": 6}}
CASES: dict[str, dict[str, Any]] = {
    "packed": {"settings": {"forward": "packed"}},
    "windows": WINDOWS,
    "windows, masked": WINDOWS | {"varlen": False},
    "prefix": {"settings": {"forward": "prefix", "beta": 0.1, "num_iterations": 2}},
    "padded": {"settings": PADDED, "model": "gpt2"},
    "token budget and filters": {"settings": BUDGET | FILTERS, "evaluate": True},
    "lora": {"settings": {"beta": 0.1}, "lora": True},
    "bitwise": {
        "settings": {"bitwise_invariant": True, "top_p": 0.9, "router_aux_loss_coef": 0.1},
        "model": "moe",
    },
}
DEFAULT = ("packed", "lora", "bitwise")  # what `make test` runs


@functools.cache
def run(case: str, device: str = "cuda:0") -> dict[str, Any]:
    """What tests/simulated/train.py prints for a case."""
    done = python("-m", "tests.simulated.train", case, ACCELERATE_TORCH_DEVICE=device)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def count(case: dict[str, Any], kind: str) -> int:
    """Of the last step."""
    return sum(run(json.dumps(case))["steps"][-1][kind].values())


def by_part(kind: str) -> tuple[float, float]:
    """What packs of 4 of the 16 completions need: for each micro-batch, and for the rest of a step."""
    cases = (CASES["packed"], CASES["packed"] | {"micro_batch": 16})  # 4 by default
    four, one = (count(case, kind) for case in cases)
    each = (four - one) / 3
    return each, one - each


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.full) for n in CASES])
def test_no_operator_mixes_devices_or_is_refused(name):
    result = run(json.dumps(CASES[name]))
    assert result["mixed"] == []
    assert result["refused"] == []
    assert len(result["steps"]) == 2
    assert all(step["launches"] for step in result["steps"])


def test_what_is_wrong_is_found():
    """An operator of two devices, and a refused one."""
    planted = run(json.dumps(CASES["bitwise"] | {"planted": True}))
    assert [line.split()[0] for line in planted["mixed"]].count("add")
    assert [line.split()[0] for line in planted["refused"]].count("cumsum")


def test_the_device_computes_what_the_cpu_does():
    one, other = (run(json.dumps(CASES["packed"]), device)["weights"] for device in ("cuda:0", "cpu"))
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < ROUNDING


# blocking copies and waits of the host, of packs without images; measured, and never more
CEILINGS = {"to_device": (2, 13), "to_host": (0, 0), "waits": (0, 37)}  # of a micro-batch, of the rest of a step


@pytest.mark.parametrize("kind", CEILINGS)
def test_the_host_waits_and_copies_no_more_than_this(kind):
    micro_batch, rest = by_part(kind)
    most, most_of_rest = CEILINGS[kind]
    assert micro_batch <= most
    assert rest <= most_of_rest


def test_another_copy_of_a_micro_batch_exceeds_the_ceiling():
    most, most_of_rest = CEILINGS["to_device"]
    assert count(CASES["packed"] | {"planted": True}, "to_device") >= 4 * (most + 1) + most_of_rest


@functools.cache
def decoded(who: str, planted: bool = False) -> dict[str, Any]:
    """What tests/simulated/decode.py prints, of rows of which some end early."""
    done = python("-m", "tests.simulated.decode", json.dumps({"who": who, "ends": [5], "planted": planted}))
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


# of a decoded token, beside its layers; launches more than transformers needs (55), which samples without keys
DECODE_CEILINGS = {"launches": 15.0, "waits": 1.1, "to_device": 0.1, "to_host": 0.0}


def excess(kind: str, planted: bool = False) -> float:
    ours, stock = decoded("ours", planted)[kind]["token"], decoded("stock")[kind]["token"]
    return ours - (stock if kind == "launches" else 0.0)


@pytest.mark.parametrize("kind", DECODE_CEILINGS)
def test_a_decoded_token_waits_copies_and_launches_no_more_than_this(kind):
    assert excess(kind) <= DECODE_CEILINGS[kind]
    assert decoded("ours")[kind]["layer"] <= decoded("stock")[kind]["layer"] + 0.1


@pytest.mark.parametrize("kind", ["launches", "waits", "to_device"])
def test_another_copy_and_wait_of_a_decoded_token_are_found(kind):
    assert excess(kind, planted=True) > DECODE_CEILINGS[kind]
