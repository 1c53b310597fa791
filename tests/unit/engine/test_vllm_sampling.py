"""Seeds of vLLM's completions: from the key alone, one each, the same in both modes of TRL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.core.keyed_random import completion_keys
from grpo_ext.engine.vllm_sampling import completion_seeds, seeded


def keys(prompts: range, group: int = 4, rollout: int = 0) -> torch.Tensor:
    rows = torch.tensor(list(prompts)).repeat_interleave(group)
    return completion_keys(3, 1, 0, rollout, rows, torch.arange(group).repeat(len(prompts)))


def seeds(prompts: range, group: int = 4, rollout: int = 0) -> list[int]:
    rows = keys(prompts, group, rollout)
    return completion_seeds(rows, torch.zeros_like(rows), group)


def test_every_completion_has_a_seed_of_its_own_that_a_server_takes():
    found = seeds(range(500))
    assert len(set(found)) == 2000
    assert all(0 <= seed < 2**63 - 2**20 for seed in found)
    assert not set(found) & set(seeds(range(500), rollout=1))


def test_seeds_do_not_depend_on_how_prompts_are_dealt():
    assert seeds(range(6)) == seeds(range(4)) + seeds(range(4, 6))


def test_a_group_has_consecutive_seeds_because_vllm_counts_up_within_a_request():
    found = seeds(range(3))
    for start in range(0, 12, 4):
        assert found[start : start + 4] == [found[start] + i for i in range(4)]


def test_a_later_turn_has_other_seeds():
    rows = keys(range(3))
    first = completion_seeds(rows, torch.zeros_like(rows), 4)
    later = completion_seeds(rows, torch.full_like(rows, 7), 4)
    assert len(set(first) | set(later)) == 24


class Params:
    def __init__(self, temperature: float, seed: int | None = None) -> None:
        self.temperature, self.seed = temperature, seed

    def clone(self) -> Params:
        return Params(self.temperature, self.seed)


def test_colocated_engines_get_one_parameter_set_for_each_row():
    asked = []
    llm = SimpleNamespace(generate=lambda prompts, sampling_params, use_tqdm: asked.append(sampling_params))
    generation = SimpleNamespace(mode="colocate", tensor_parallel_size=1, llm=llm)
    before, shared = llm.generate, Params(0.7)
    with seeded(generation, [5, 6], 2):
        generation.llm.generate(["a", "b"], sampling_params=shared, use_tqdm=False)
    assert [(p.temperature, p.seed) for p in asked[0]] == [(0.7, 5), (0.7, 6)]
    assert shared.seed is None
    assert llm.generate is before


def server(main: bool = True) -> tuple[SimpleNamespace, list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    def generate(prompts: Any, features: Any = None, **params: Any) -> dict[str, Any]:
        asked.append({"prompts": prompts, "features": features, **params})
        base = params["generation_kwargs"]["seed"]
        return {
            "prompt_ids": prompts,
            "completion_ids": [[base + i] for i in range(params["n"])],
            "logprobs": [[[0.0]]] * params["n"],
            "logprob_token_ids": None,
        }

    client = SimpleNamespace(generate=generate)
    generation = SimpleNamespace(mode="server", vllm_client=client, accelerator=SimpleNamespace(is_main_process=main))
    return generation, asked


def test_a_server_is_asked_once_for_each_prompt_and_answers_in_order():
    generation, asked = server()
    found = seeds(range(3), 2)
    with seeded(generation, found, 2):
        answer = generation.vllm_client.generate(
            prompts=[[1], [2], [3]], n=2, temperature=0.5, generation_kwargs={"min_tokens": 1}
        )
    assert answer["prompt_ids"] == [[1], [2], [3]]
    assert answer["completion_ids"] == [[seed] for seed in found]  # what colocate mode would sample
    assert len(answer["logprobs"]) == 6
    assert answer["logprob_token_ids"] is None
    assert sorted(len(question["prompts"]) for question in asked) == [1, 1, 1]
    assert all(question["generation_kwargs"]["min_tokens"] == 1 for question in asked)


def test_images_go_with_their_prompt():
    generation, asked = server()
    with seeded(generation, [1, 2], 1):
        generation.vllm_client.generate(prompts=[[1], [2]], features=["x", "y"], n=1)
    assert {question["prompts"][0][0]: question["features"] for question in asked} == {1: ["x"], 2: ["y"]}


def test_a_failing_request_is_an_error():
    generation, _ = server()

    def broken(**params: Any) -> dict[str, Any]:
        raise ConnectionError("the server is gone")

    generation.vllm_client.generate = broken
    with seeded(generation, [1], 1), pytest.raises(ConnectionError):
        generation.vllm_client.generate(prompts=[[1]], n=1)
