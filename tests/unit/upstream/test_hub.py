"""A model in the cache of the Hub is found without a network, and another one is named."""

import json

import huggingface_hub
import pytest

from grpo_ext.errors import GrpoExtError
from grpo_ext.tools.plan import load_config
from grpo_ext.upstream.argument_checks import find_model


def test_a_model_in_the_cache_is_found_without_a_network(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    find_model("some/model", {"cache_dir": str(tmp_path)})
    with pytest.raises(GrpoExtError, match="'some/other' cannot be loaded; check the path or the name"):
        find_model("some/other", {"cache_dir": str(tmp_path)})
    with pytest.raises(GrpoExtError, match="'some/other' cannot be loaded; check the path or the name"):
        load_config("some/other")
