"""What identifies a run is read of models of every size."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from grpo_ext.run.fingerprint import differences, model_fingerprint
from tests.support.tiny import tiny_model


def model(rows: int, value: float = 0.0) -> torch.nn.Module:
    weight = torch.full((1,), value).expand(rows)  # takes no memory
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    return holder


def test_frozen_weights_of_every_size_are_read():
    # in float32 the index of the last of these elements is rounded up to their number
    for rows in (1, 63, 2**24 + 4, 49152 * 576):
        assert model_fingerprint(model(rows))["frozen"] != model_fingerprint(model(rows, 1.0))["frozen"]


def test_an_adapter_is_the_same_in_every_process():
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapters = model_fingerprint(get_peft_model(tiny_model(), LoraConfig(target_modules=modules)))["adapters"]
    assert adapters["default"]["target_modules"] == sorted(modules)  # PEFT's set has another order in every process


def test_what_differs_is_named():
    old, new = ({"default": {"r": rank, "modules": ["a", "b"]}} for rank in (4, 8))
    assert differences("model.adapters", old, new) == [("model.adapters.default.r", 4, 8)]
