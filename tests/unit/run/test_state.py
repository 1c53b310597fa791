"""What a run remembers beside model, optimizer and scheduler."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_ext.errors import CheckpointError
from grpo_ext.forward.snapshot import Weights
from grpo_ext.rollouts.batch import RolloutBatch, batch_state, saved_batch
from grpo_ext.rollouts.source import saved_waiting, waiting_state
from grpo_ext.run.state import STATE, load_state, save_state
from tests.support.batches import batch_of_rows


def kept(folder: Path, state: Any) -> Any:
    """A state as it is read from the folder that it was written to."""
    save_state(folder, {"part": state})
    states = load_state(folder)
    assert states is not None
    return states["part"]


def test_rollout_batches_that_the_same_weights_sample_share_them(tmp_path):
    """Also after they were read: with `rollout_lag=2`, a resumed run would take the memory of three moments for two."""
    first, second = (Weights({"global_step": step}, {"weight": torch.full((2,), float(step))}, {}) for step in (0, 1))
    steps, weights = zip(*saved_waiting(kept(tmp_path, waiting_state([(1, first), (2, first), (3, second)]))))
    assert steps == (1, 2, 3)
    assert weights[0] is weights[1]
    assert [moment.policy["weight"].tolist() for moment in weights] == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]


def rollout(**fields: Any) -> RolloutBatch:
    """Two completions of one group."""
    logps, ratio = [[-1.0, -2.0], [-3.0]], torch.tensor([[0.5], [0.25]])
    columns = {"old_per_token_logps": logps, "importance_sampling_ratio": ratio}
    batch = batch_of_rows([[5, 6], [5, 6]], [[7, 8], [9]], torch.tensor([1.0, -1.0]), 2, **columns)
    return replace(batch, columns={**batch.columns, **fields})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other if isinstance(one, list) else torch.equal(one.values, other.values)


def test_a_rollout_batch_is_read_as_it_was_written(tmp_path):
    fields = {"one": torch.ones(2), "cube": torch.rand(2, 3, 4), "flags": torch.tensor([True, False])}
    written = rollout(**fields, texts=["a", "b"], records=[{"n": 1}, {"n": [2.5, None]}], pairs=[(1, "a"), (2, "b")])
    constants = {"shift": torch.tensor(0.5), "kind": "math", "nothing": None}
    written = replace(written, constants=constants, widths=(4, 6), items_per_token=1.25)
    read = saved_batch(kept(tmp_path, batch_state(written)))
    assert (read.widths, read.items_per_token, list(read.groups)) == ((4, 6), 1.25, [0, 0])
    assert read.columns.keys() == written.columns.keys()
    assert all(same(column, read.columns[name]) for name, column in written.columns.items())
    assert torch.equal(read.constants.pop("shift"), constants.pop("shift"))
    assert read.constants == constants


def test_a_checkpoint_that_lacks_the_state_is_another_versions_or_another_trainers(tmp_path):
    (tmp_path / "optimizer.pt").touch()
    assert load_state(tmp_path) is None
    (tmp_path / "grpo_ext_state.json").touch()
    with pytest.raises(CheckpointError, match=f"{tmp_path}.* of another version"):
        load_state(tmp_path)


@pytest.mark.parametrize("values", [[Path, Path], [np.float64(1), np.float64(2)], [lambda: 1, lambda: 2]])
def test_objects_that_a_checkpoint_cannot_hold_leave_the_rollout_batch_out(values, caplog):
    assert batch_state(rollout(kinds=values)) is None
    assert "cannot hold kinds of this rollout batch" in caplog.text


def test_a_state_is_read_without_running_what_it_holds(tmp_path):
    torch.save({"part": Path}, tmp_path / STATE)
    with pytest.raises(CheckpointError, match="is broken"):
        load_state(tmp_path)
