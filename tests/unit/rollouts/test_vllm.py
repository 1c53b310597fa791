"""vLLM without an engine: seeds from the key alone, the same in both modes of TRL, and step-wide statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.algorithms.advantages import AdvantageRule
from grpo_ext.algorithms.importance import RatioRule
from grpo_ext.algorithms.keyed_random import completion_keys
from grpo_ext.rollouts.batch import RolloutBatch
from grpo_ext.rollouts.images import ImageSource
from grpo_ext.rollouts.join import Context, Entry, Round
from grpo_ext.rollouts.ragged import Ragged
from grpo_ext.rollouts.records import rollout_metrics
from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.rollouts.vllm import seeded, seeds_of


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


class Params:
    def __init__(self, temperature: float, seed: int | None = None) -> None:
        self.temperature, self.seed = temperature, seed

    def clone(self) -> Params:
        return Params(self.temperature, self.seed)


class Generation(SimpleNamespace):
    """As TRL's `VLLMGeneration`: generates with what it holds."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return (self.llm if self.mode == "colocate" else self.vllm_client).generate(*args, **kwargs)


def test_colocated_engines_get_one_parameter_set_for_each_row():
    asked = []
    llm = SimpleNamespace(generate=lambda prompts, sampling_params, use_tqdm: asked.append(sampling_params))
    llm.device = "cuda"
    generation = Generation(mode="colocate", tensor_parallel_size=1, llm=llm)
    shared = Params(0.7)
    with seeded(generation, [5, 6], 2):
        generation.generate(["a", "b"], sampling_params=shared, use_tqdm=False)
        assert generation.llm.device == "cuda"  # what else TRL reads of the engine
    assert [(p.temperature, p.seed) for p in asked[0]] == [(0.7, 5), (0.7, 6)]
    assert shared.seed is None
    generation.generate(["a"], sampling_params=shared, use_tqdm=False)
    assert asked[1] is shared  # the engine itself is as it was


def server() -> tuple[SimpleNamespace, list[dict[str, Any]]]:
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
    generation = Generation(mode="server", vllm_client=client, accelerator=SimpleNamespace(is_main_process=True))
    return generation, asked


def test_a_server_is_asked_once_for_each_prompt_and_answers_in_order():
    generation, asked = server()
    found = seeds(range(3), 2)
    with seeded(generation, found, 2):
        given = {"prompts": [[1], [2], [3]], "features": ["x", "y", "z"]}
        answer = generation.generate(**given, n=2, temperature=0.5, generation_kwargs={"min_tokens": 1})
    assert answer["prompt_ids"] == [[1], [2], [3]]
    assert answer["completion_ids"] == [[seed] for seed in found]  # what colocate mode would sample
    assert len(answer["logprobs"]) == 6
    assert answer["logprob_token_ids"] is None
    asked_for = sorted((*question["prompts"], *question["features"]) for question in asked)
    assert asked_for == [([1], "x"), ([2], "y"), ([3], "z")]
    assert all(question["generation_kwargs"]["min_tokens"] == 1 for question in asked)


def test_a_failing_request_is_an_error():
    generation, _ = server()

    def broken(**params: Any) -> dict[str, Any]:
        raise ConnectionError("the server is gone")

    generation.vllm_client.generate = broken
    with pytest.raises(ConnectionError), seeded(generation, [1], 1):
        generation.generate(prompts=[[1]], n=1)


# ---- How far vLLM's log-probabilities are from the trainer's --------------------------------------------------------


def sampling_metrics(parts: Sequence[RolloutBatch], level: str | None) -> dict[str, float]:
    """What is logged of how vLLM sampled these rounds."""
    ratios = None if level is None else RatioRule(level, None, None)
    terms: Any = SimpleNamespace(rewards=SimpleNamespace(names=["r"]), weights_F=torch.ones(1), ratios=ratios)
    context = Context(terms, 1, AdvantageRule(), ImageSource())
    rounds = []
    for part in parts:
        entries = [Entry("", "", None, 1, 1, False)] * len(part)
        rewards_BF, advantages = torch.zeros(len(part), 1), torch.zeros(len(part))
        rounds.append(Round(part, rewards_BF, advantages, entries, [], range(len(part))))
    found = rollout_metrics(rounds, context, with_tools=False)
    return {name: value for name, value in found if name.startswith("sampling/")}


def share(rows: Sequence[int], sequence_level: bool) -> RolloutBatch:
    columns: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        source, length = torch.Generator().manual_seed(row), 1 + row % 5
        sampling = torch.rand(length, generator=source)
        values = {
            "completion_ids": torch.zeros(length, dtype=torch.long),
            "completion_mask": torch.full((length,), int(row % 4 != 3)),
            "tool_mask": (torch.arange(length) != 1).long(),
            "old_per_token_logps": torch.rand(length, generator=source),
            "sampling_per_token_logps": torch.where(torch.arange(length) == 2, math.nan, sampling),
            "importance_sampling_ratio": 1 + torch.rand(1 if sequence_level else length, generator=source),
        }
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    ragged: Any = {name: Ragged.of(values) for name, values in columns.items()}
    if sequence_level:
        ragged["importance_sampling_ratio"] = ragged["importance_sampling_ratio"].values[:, None]
    prompts = {"prompt_ids": ragged["completion_ids"], "prompt_mask": ragged["completion_mask"]}
    return RolloutBatch.of_columns({**ragged, **prompts, "advantages": torch.zeros(len(rows))}, 1)


@pytest.mark.parametrize("sequence_level", [False, True])
def test_the_statistics_are_those_of_all_tokens_whoever_sampled_them(sequence_level):
    parts = [share(rows, sequence_level) for rows in (range(3), range(3, 4), range(4, 11))]  # the second has no token
    whole = RolloutBatch.joined(parts, 1)
    level = "sequence_mask" if sequence_level else "token_mask"
    found = sampling_metrics([whole], level)
    assert found == sampling_metrics(parts, level)
    alone = [sampling_metrics([part], level) for part in parts]
    assert 0.0 < min(found.values()) < 5.0
    # what TRL logs: the least of the processes' minima, the mean of their means
    name = "sampling/sampling_logp_difference/mean"
    assert found[name] != pytest.approx(sum(part[name] for part in alone) / 3)
    name = "sampling/importance_sampling_ratio/min"
    assert found[name] >= 1.0
    assert min(part[name] for part in alone) == (found[name] if sequence_level else 0.0)
    masks = [mask.bool() for mask in whole.loss_masks]
    ratios = torch.cat([r if sequence_level else r[m] for r, m in zip(whole["importance_sampling_ratio"], masks)])
    assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(ratios.double().mean().item())
