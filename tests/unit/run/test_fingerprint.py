"""What identifies a run is read of models of every size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

from grpo_ext.run.fingerprint import differences, model_fingerprint
from tests.support.launch import ROOT


def model(rows: int, value: float = 0.0) -> torch.nn.Module:
    weight = torch.full((1,), value).expand(rows)  # takes no memory
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    return holder


def test_frozen_weights_of_every_size_are_read():
    # in float32 the index of the last of these elements is rounded up to their number
    for rows in (1, 63, 2**24 + 4, 49152 * 576):
        assert model_fingerprint(model(rows))["frozen"] != model_fingerprint(model(rows, 1.0))["frozen"]


def adapted(seed: str) -> dict[str, Any]:
    """The fingerprint of a model with an adapter, in a process with a hash seed of its own."""
    code = (
        "import json; from peft import LoraConfig, get_peft_model; from tests.support.tiny import tiny_model;"
        "from grpo_ext.run.fingerprint import differences, model_fingerprint as told;"
        "modules = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'];"
        "model = get_peft_model(tiny_model(), LoraConfig(target_modules=modules));"
        "model.peft_config['default'].base_model_name_or_path = None;"
        "print(json.dumps(told(model)['adapters']))"
    )
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_adapter_is_the_same_in_every_process():
    assert adapted("1") == adapted("2")


def test_what_differs_is_named():
    old, new = ({"default": {"r": rank, "modules": ["a", "b"]}} for rank in (4, 8))
    assert differences("model.adapters", old, new) == [("model.adapters.default.r", 4, 8)]
