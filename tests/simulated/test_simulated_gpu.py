"""A simulated CUDA device: no operator mixes devices, and the host waits and copies no more than it has to.

What runs here is not a GPU: kernels are the CPU's, and nothing is timed (see device.py).
"""

import functools
import json
from typing import Any

import pytest

from tests.support.forks import python
from tests.support.selection import few_of

SUMMED = {"top_h": 0.9, "typical_p": 0.95}  # filters with running sums, as top_p
FILTERS = {"top_p": 0.9, "min_p": 0.02, "top_k": 20, "repetition_penalty": 1.1}
BUDGET = {"micro_batch_tokens": 100, "entropy_coef": 0.01, "gradient_checkpointing": True, "eval_pass_threshold": 0.0}
PADDED = {"forward": "padded", "mask_truncated_completions": True, "top_entropy_quantile": 0.5}
REUSED = {"rollout_batch_size": 32, "num_iterations": 2, "off_policy_mask_threshold": 1e-4}
SYNCED = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
SEQUENCES = {"loss_type": "grpo", "delta": 1.2, "importance_sampling_level": "sequence"}
FAR = {"trust_region": "kl", "trust_region_threshold": 1e-5, "sequence_mask_high": 1.02, "loss_type": "dr_grpo"}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef_delta": 0.05}
PACKED: dict[str, Any] = {"settings": {"forward": "packed"}}
SHALLOW = {"shape": {"num_hidden_layers": 1}}  # the layers of these models are alike
TWO_LAYERS = {"shape": {"num_hidden_layers": 2}}  # a gradient goes through the dropout of the second alone
WINDOWS = PACKED | {"model": "mistral", "shape": {"sliding_window": 6}}
CASES: dict[str, dict[str, Any]] = {
    "packed": PACKED | SHALLOW,
    "packed, masked": PACKED | {"varlen": False},
    "windows": WINDOWS,
    "windows, masked": WINDOWS | {"varlen": False},
    "soft caps": {"model": "gemma2"},
    "learned positions": PACKED | {"model": "gpt2"},
    "half precision": PACKED | {"shape": {"dtype": "bfloat16"}},
    "experts": {"model": "moe", "settings": {"router_aux_loss_coef": 0.1, "routing_replay": True}},
    "prefix": {"settings": {"forward": "prefix", "beta": 0.1, "num_iterations": 2}},
    "hybrid": {"model": "qwen3_next", "settings": {"gradient_checkpointing": True}},
    "images": {"model": "llava", "settings": {"beta": 0.1}},
    "images, their own positions": {"model": "qwen2_5_vl"},
    "padded": {"settings": PADDED, "model": "gpt2"},
    "token budget and filters": {"settings": BUDGET | FILTERS, "evaluate": True},
    "lora": TWO_LAYERS | {"settings": {"beta": 0.1}, "lora": True},
    "lora, dropout": TWO_LAYERS | {"settings": {"beta": 0.1}, "lora": True, "rate": 0.05},
    "lora, prefix": {"settings": {"beta": 0.1, "forward": "prefix"}, "lora": True},
    "lora, bitwise": {"settings": {"beta": 0.1, "bitwise_invariant": True}, "lora": True},
    "bitwise": {
        "settings": {"bitwise_invariant": True, "router_aux_loss_coef": 0.1, "top_p": 0.9, "generation_kwargs": SUMMED},
        **{"model": "moe", **SHALLOW},
    },
    "reused rollouts": {"settings": REUSED | SYNCED},
    "sequence ratios": {"settings": SEQUENCES | ADAPTIVE | {"rollout_batch_size": 32}},
    "tokens too far": {"settings": REUSED | FAR | {"advantage_estimator": "optimal_baseline"}},
    "teacher": {"settings": {"teacher_kl_coef": 0.5, "beta": 0.1}, "teacher": True},
    "teacher, ahead": {"settings": {"rollout_lag": 1}, "teacher": True},
    "dynamic sampling": {"settings": {"dynamic_sampling": True, "forward": "prefix"}},
    "ahead": {"settings": {"rollout_lag": 1}},
    "generate": {"settings": {"full_determinism": True}, "compact": False},
}
DEFAULT = ("packed", "bitwise")  # what `make test` runs
OTHERS = {
    "one micro-batch": CASES["packed"] | {"micro_batch": 16},
    "planted": CASES["bitwise"] | {"planted": True, "max_steps": 1},
    "packed, planted": CASES["packed"] | {"planted": True, "max_steps": 1},
}
EACH = pytest.mark.parametrize("name", few_of(CASES, DEFAULT))


@functools.cache
def trained(default: bool, device: str) -> dict[str, Any]:
    """What tests/simulated/train.py prints: one process for the cases of `make test`, and one for the rest."""
    cases = {name: case for name, case in CASES.items() if (name in DEFAULT) == default}
    cases |= OTHERS if default and device == "cuda:0" else {}
    done = python("-m", "tests.simulated.train", json.dumps(cases), timeout_s=1800, ACCELERATE_TORCH_DEVICE=device)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run(name: str, device: str = "cuda:0") -> dict[str, Any]:
    result = trained(name in DEFAULT or name in OTHERS, device)[name]
    assert "error" not in result, result["error"]
    return dict(result)


def count(name: str, kind: str) -> int:
    counted = run(name)["steps"][-1][kind]
    return counted if kind == "launches" else sum(counted.values())


def by_part(kind: str) -> tuple[float, float]:
    """What packs of 4 of the 16 completions need: for each micro-batch, and for the rest of a step."""
    four, one = (count(name, kind) for name in ("packed", "one micro-batch"))
    each = (four - one) / 3
    return each, one - each


@EACH
def test_no_operator_mixes_devices_or_is_refused(name):
    result = run(name)
    assert result["mixed"] == []
    assert result["refused"] == []
    assert len(result["steps"]) == 2
    assert all(step["launches"] for step in result["steps"])


def test_what_is_wrong_is_found():
    """An operator of two devices, and a refused one."""
    planted = run("planted")
    assert [line.split()[0] for line in planted["mixed"]].count("add")
    assert [line.split()[0] for line in planted["refused"]].count("cumsum")


@EACH
def test_the_device_computes_the_bits_of_the_cpu(name):
    assert run(name)["weights"] == run(name, "cpu")["weights"]


def test_another_order_of_sums_has_other_bits():
    assert run("packed")["weights"] != run("one micro-batch")["weights"]


# launches, blocking copies and waits of the host, of packs without images, their completions given; measured, and never
# more (one of the waits is for the gradient norm in the trail). Of the launches 275 are the model's and its backward's
CEILINGS = {"launches": (460, 71), "to_device": (2, 1), "to_host": (0, 0), "waits": (0, 4)}  # a micro-batch, the rest


@pytest.mark.parametrize("kind", CEILINGS)
def test_the_host_waits_and_copies_no_more_than_this(kind):
    micro_batch, rest = by_part(kind)
    most, most_of_rest = CEILINGS[kind]
    assert micro_batch <= most
    assert rest <= most_of_rest


@pytest.mark.full
def test_dropout_launches_at_most_a_kernel_forward_and_one_backward():
    """Triton's, which does not run here: its mask and product are computed on the CPU, and counted as one."""
    with_dropout, without = (run(name)["steps"][-1]["launches"] for name in ("lora, dropout", "lora"))
    micro_batches, modules = 4, 4
    assert micro_batches * modules < with_dropout - without <= 2 * micro_batches * modules
    assert with_dropout <= 1.1 * without


def test_another_copy_of_a_micro_batch_exceeds_the_ceiling():
    most, most_of_rest = CEILINGS["to_device"]
    assert count("packed, planted", "to_device") >= 4 * (most + 1) + most_of_rest
