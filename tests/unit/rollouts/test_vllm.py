"""vLLM without an engine: seeds from the key alone, the same in both modes of TRL."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_ext.algorithms.keyed_random import completion_keys
from grpo_ext.errors import RolloutError
from grpo_ext.forward.routing import LIVE, Router
from grpo_ext.rollouts.transcript import Sampled, Transcript
from grpo_ext.rollouts.vllm import VllmServer, seeds_of
from grpo_ext.rollouts.vllm_replay import experts_of
from tests.support.server import generation_settings


def keys(prompts: range, group: int = 4, rollout: int = 0) -> torch.Tensor:
    rows = torch.tensor(list(prompts)).repeat_interleave(group)
    return completion_keys(3, 1, 0, rollout, rows, torch.arange(group).repeat(len(prompts)))


def seeds(prompts: range, group: int = 4, rollout: int = 0) -> list[int]:
    rows = keys(prompts, group, rollout)
    return seeds_of([Transcript({}, key) for key in rows.tolist()], group)


def test_seeds_follow_from_the_key_alone_and_fit_a_server():
    found = seeds(range(500))
    assert len(set(found)) == 2000
    assert all(0 <= seed < 2**63 - 2**20 for seed in found)
    assert not set(found) & set(seeds(range(500), rollout=1))
    assert found == seeds(range(4)) + seeds(range(4, 500))
    assert found[4:8] == [found[4] + i for i in range(4)]  # vLLM counts up within a request
    later = seeds_of([Transcript({}, key, ids=[0] * 7) for key in keys(range(500)).tolist()], 4)  # a second turn
    assert not set(found) & set(later)


def test_experts_of_the_layers_with_a_router_are_taken_in_the_dtype_of_recorded_ones():
    completion = SimpleNamespace(routed_experts=np.array([[[0, 0], [299, 5], [0, 0], [7, 8]]], np.uint16))
    routers = [Router(slice(0, 2), 4, 300, 1), Router(slice(2, 4), 4, 300, 3)]
    experts_NC = experts_of(completion, 2, routers)
    assert experts_NC.tolist() == [[299, 5, 7, 8], [LIVE] * 4]
    assert experts_NC.dtype == routers[0].dtype == torch.int16
    with pytest.raises(RolloutError, match=r"layers \[1, -1\]"):  # a router whose layer is not known
        experts_of(completion, 2, [routers[0], dataclasses.replace(routers[1], layer=-1)])


def server() -> tuple[VllmServer, list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    def generate(prompts: Any, n: int, generation_kwargs: Any, **params: Any) -> dict[str, Any]:
        asked.append({"prompt": prompts[0], "n": n, "generation_kwargs": generation_kwargs, **params})
        ids = [[generation_kwargs["seed"] + i] for i in range(n)]
        return {"completion_ids": ids, "logprobs": [[[-1.0, -2.0]]] * n}

    settings = generation_settings(temperature=0.5, max_completion_length=4, generation_kwargs={"min_tokens": 1})
    return VllmServer(settings, SimpleNamespace(generate=generate)), asked


def transcripts() -> list[Transcript]:
    """Three groups of two, each of one prompt."""
    return [Transcript({}, key, prompt_ids=[1 + place // 2]) for place, key in enumerate(keys(range(3), 2).tolist())]


def test_a_server_is_asked_once_for_each_prompt_and_answers_in_order():
    engine, asked = server()
    sampled = engine.generate(transcripts(), None, 2)
    assert sampled == [
        Sampled([seed], [-1.0]) for seed in seeds(range(3), 2)
    ]  # what an engine of this process would sample
    assert sorted(request["prompt"] for request in asked) == [[1], [2], [3]]
    for request in asked:
        assert (request["n"], request["min_p"], request["max_tokens"], request["temperature"]) == (2, 0.0, 4, 0.5)
        assert request["generation_kwargs"]["min_tokens"] == 1


def test_a_server_that_returns_other_rows_is_refused():
    engine, _ = server()
    answer = engine.client.generate
    engine.client.generate = lambda n, **request: answer(n=n + 1, **request)
    with pytest.raises(RolloutError, match="returned 3 completions of a prompt; 2 were wanted"):
        engine.generate(transcripts(), None, 2)


def test_rows_that_no_longer_share_their_tokens_are_asked_for_one_by_one():
    engine, asked = server()
    rows = transcripts()[1:]  # a transcript of the first group has ended
    for row in rows:
        row.ids = [7]
    assert [row.ids for row in engine.generate(rows, None, 2)] == [[seed] for seed in seeds_of(rows, 2)]
    assert [request["n"] for request in asked] == [1] * 5
