"""What identifies a run is read of models of every size."""

import torch

from grpo_ext.run.fingerprint import model_fingerprint


def model(rows: int, value: float = 0.0) -> torch.nn.Module:
    weight = torch.full((1,), value).expand(rows)  # takes no memory
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    return holder


def test_frozen_weights_of_every_size_are_read():
    # in float32 the index of the last of these elements is rounded up to their number
    for rows in (1, 63, 2**24 + 4, 49152 * 576):
        assert model_fingerprint(model(rows))["frozen"] != model_fingerprint(model(rows, 1.0))["frozen"]
