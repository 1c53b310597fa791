"""What identifies a run is read of models of every size."""

from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image

from grpo_ext.config import GRPOConfig
from grpo_ext.run.fingerprint import changed, data_fingerprint, model_fingerprint, settings_of
from tests.support.tiny import config_kwargs, tiny_model


def frozen(rows, value):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.full((1,), value).expand(rows), requires_grad=False)  # takes no memory
    return model_fingerprint(model, {}, whole=True)["frozen"]


def test_a_threshold_counts_where_an_estimator_takes_it_and_a_teacher_by_its_coefficient(tmp_path):
    def fingerprint(**changes: Any) -> dict[str, Any]:
        args = GRPOConfig(**config_kwargs(tmp_path, **changes))
        return {"model": {}, "settings": settings_of(args, args.geometry)}

    plain, at_2 = fingerprint(), {"advantage_estimator": "pass_at_k", "advantage_k": 2}
    assert changed(plain, fingerprint(eval_pass_threshold=0.5)) == {}  # which concerns evaluations only
    trained, passing = fingerprint(**at_2), fingerprint(**at_2, eval_pass_threshold=0.5)
    assert changed(plain, trained) == {"advantage_estimator": (None, "pass_at_k"), "advantage_k": (None, 2)}
    assert changed(trained, passing) == {"eval_pass_threshold": (None, 0.5)}
    assert changed(plain, fingerprint(teacher_kl_coef=0.5)) == {"teacher_kl_coef": (None, 0.5)}
    region = {"trust_region": "tv", "trust_region_threshold": 0.1}
    assert changed(plain, fingerprint(**region)) == {name: (None, value) for name, value in region.items()}


def test_another_fixed_model_is_another_run():
    def found(**sizes: int) -> dict[str, Any]:
        teacher = {"teacher": tiny_model("llama", **sizes)} if sizes else {}
        return {"model": model_fingerprint(torch.nn.Linear(1, 1), teacher, whole=False), "settings": {}}

    assert changed(found(intermediate_size=32), found(intermediate_size=32)) == {}
    for other in (found(), found(intermediate_size=48)):
        ((name, _),) = changed(found(intermediate_size=32), other).items()
        assert name == "model.others"


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
