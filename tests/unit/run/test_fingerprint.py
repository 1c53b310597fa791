"""What identifies a run is read of models of every size."""

import pytest
import torch
from datasets import Dataset, Features, Image

from grpo_ext.run.fingerprint import data_fingerprint, model_fingerprint


def frozen(rows, value):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.full((1,), value).expand(rows), requires_grad=False)  # takes no memory
    return model_fingerprint(model)["frozen"]


def test_frozen_weights_of_every_size_are_read():
    # in float32 the index of the last of these elements is rounded up to their number
    for rows in (1, 63, 2**24 + 4, 49152 * 576):
        assert frozen(rows, 0.0) != frozen(rows, 1.0)


@pytest.mark.parametrize("column", ["pixels", "nested"])
def test_images_are_read_without_the_folder_they_lie_in(column, tmp_path):
    def data(color: int, folder: str) -> Dataset:
        image = {"bytes": bytes([color] * 40), "path": f"{folder}/picture.png"}
        if column == "pixels":
            return Dataset.from_list([{"image": image}], features=Features({"image": Image()}))
        return Dataset.from_list([{"image": [image]}], features=Features({"image": [Image()]}))

    assert data_fingerprint(data(1, "here")) == data_fingerprint(data(1, "/there"))
    assert data_fingerprint(data(1, "here")) != data_fingerprint(data(2, "here"))
