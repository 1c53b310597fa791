"""What identifies a run is read of models of every size."""

from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image

from grpo_ext.config import GRPOConfig
from grpo_ext.run.fingerprint import changed, data_fingerprint, model_fingerprint, settings_of
from tests.support.tiny import config_kwargs


def frozen(rows, value):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.full((1,), value).expand(rows), requires_grad=False)  # takes no memory
    return model_fingerprint(model)["frozen"]


def test_an_optional_setting_is_absent_where_it_is_off_and_compared_where_one_run_has_it(tmp_path):
    def fingerprint(**changes: Any) -> dict[str, Any]:
        args = GRPOConfig(**config_kwargs(tmp_path, **changes))
        return {"model": {}, "settings": settings_of(args, args.geometry)}

    plain = fingerprint(eval_pass_threshold=0.5)  # which concerns evaluations only
    assert not {"advantage_k", "eval_pass_threshold"} & plain["settings"].keys()
    at_2 = {"advantage_estimator": "pass_at_k", "advantage_k": 2}
    trained, passing = fingerprint(**at_2), fingerprint(**at_2, eval_pass_threshold=0.5)
    assert changed(plain, trained) == {"advantage_estimator": (None, "pass_at_k"), "advantage_k": (None, 2)}
    assert changed(trained, plain) == {"advantage_estimator": ("pass_at_k", None), "advantage_k": (2, None)}
    assert changed(trained, passing) == {"eval_pass_threshold": (None, 0.5)}
    assert changed({"model": {}, "settings": {}}, trained) == {}  # a checkpoint of another trainer


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
