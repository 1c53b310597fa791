"""What a run remembers beside model, optimizer and scheduler."""

from __future__ import annotations

import torch

from grpo_ext.forward.snapshot import Weights
from grpo_ext.run.state import RunState


def test_rollout_batches_that_the_same_weights_sample_share_them(tmp_path):
    """Also after they were read: with `rollout_lag=2`, a resumed run would take the memory of three moments for two."""
    first, second = (Weights({"global_step": step}, {"weight": torch.full((2,), float(step))}, {}) for step in (0, 1))
    RunState(waiting=[(1, first), (2, first), (3, second)]).save(tmp_path)
    state = RunState.load(tmp_path, num_generations=4)
    assert state is not None
    (steps, weights) = zip(*state.waiting)
    assert steps == (1, 2, 3)
    assert weights[0] is weights[1]
    assert [moment.policy["weight"].tolist() for moment in weights] == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
