"""What stays on a device between micro-batches, and what is sent there only once."""

import torch

from grpo_ext.algorithms import digests
from grpo_ext.step import optimizer_step
from tests.support.trainers import make

PARAMETERS = 4200  # more than a cache of a power of two would hold for a large model


def test_the_masks_of_a_measured_step_hold_no_column_of_its_micro_batches(tmp_path, monkeypatch):
    """A column may be a part of the buffer that brought a micro-batch to the device."""
    columns, measured = [], []
    loss_mask, set_statistics = optimizer_step.loss_mask, optimizer_step.set_statistics

    def masked(*args):
        columns.append(loss_mask(*args))
        return columns[-1]

    def noted(step, statistics, quantile):
        measured.extend(statistics)
        set_statistics(step, statistics, quantile)

    monkeypatch.setattr(optimizer_step, "loss_mask", masked)
    monkeypatch.setattr(optimizer_step, "set_statistics", noted)
    make(tmp_path, top_entropy_quantile=0.5, max_steps=1).train()
    assert measured
    storages = {column.untyped_storage().data_ptr() for column in columns}
    assert not storages & {part.mask_S.untyped_storage().data_ptr() for part in measured}


def test_the_factors_of_a_parameter_are_computed_once_however_many_parameters_there_are():
    digests._of_blocks.cache_clear()
    for _ in range(2):
        for key in range(PARAMETERS):
            digests._of_blocks(key, 1, torch.device("cpu"))
    assert digests._of_blocks.cache_info()[:2] == (PARAMETERS, PARAMETERS)
