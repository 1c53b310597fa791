"""A model of the Hub that cannot be reached is asked for once, and one in the cache is found."""

from __future__ import annotations

import json
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import _http

from grpo_ext.checks.model import find_model
from grpo_ext.errors import GrpoExtError
from grpo_ext.tools import export
from grpo_ext.tools.plan import load_config

httpx = getattr(_http, "httpx2", None) or _http.httpx  # as huggingface_hub has it


@pytest.fixture
def asked(monkeypatch):
    """The addresses of models that were asked for, while there is no network."""
    addresses: list[str] = []

    class Client(httpx.Client):
        def send(self, request: Any, **options: Any) -> Any:
            if "some/" in str(request.url):  # huggingface_hub has questions of its own
                addresses.append(str(request.url))
            raise httpx.ConnectError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.set_client_factory(Client)
    yield addresses
    huggingface_hub.set_client_factory(_http.default_client_factory)


@pytest.mark.parametrize("use", [load_config, export._load_base, lambda name: find_model(name, {"revision": "v1"})])
def test_a_model_that_cannot_be_reached_is_asked_for_once_and_named(asked, use):
    with pytest.raises(
        GrpoExtError, match="model 'some/model' cannot be loaded; check the path or the name"
    ) as refused:
        use("some/model")
    assert "couldn't connect" in str(refused.value)
    assert len(asked) == 1, asked


def test_a_model_in_the_cache_is_found_without_a_network(asked, tmp_path):
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    find_model("some/model", {"cache_dir": str(tmp_path)})
    with pytest.raises(GrpoExtError, match="'some/other' cannot be loaded"):
        find_model("some/other", {"cache_dir": str(tmp_path)})
