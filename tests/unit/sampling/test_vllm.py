"""vLLM without an engine: seeds follow from keys alone, and answers of a server belong to their rows."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from grpo_ext.algorithms.keyed_random import completion_keys
from grpo_ext.errors import RolloutError
from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.sampling.vllm import seeds_of
from tests.support.server import stand_in
from tests.support.tool_runs import always_calling
from tests.support.trainers import first_line, make
from tests.tolerances import METRIC


def seeds(prompts: range, rollout: int = 0, ids: Sequence[int] = ()) -> list[int]:
    """Of groups of four after tokens `ids`."""
    rows = torch.tensor(list(prompts)).repeat_interleave(4)
    keys = completion_keys(3, 1, 0, rollout, rows, torch.arange(4).repeat(len(prompts)))
    return seeds_of([Transcript(key, ids=[*ids]) for key in keys.tolist()], 4)


def test_seeds_follow_from_the_key_alone_and_fit_a_server():
    found = seeds(range(500))
    assert len(set(found)) == 2000
    assert all(0 <= seed < 2**63 - 2**20 for seed in found)
    assert not set(found) & set(seeds(range(500), rollout=1))
    assert found == seeds(range(4)) + seeds(range(4, 500))
    assert found[4:8] == [found[4] + i for i in range(4)]  # vLLM counts up within a request
    assert not set(found) & set(seeds(range(500), ids=[0] * 7))  # a second turn


SERVER = {"use_vllm": True, "vllm_mode": "server", "top_k": 0}


def test_a_server_that_returns_other_rows_is_refused(tmp_path, monkeypatch):
    client = stand_in(tmp_path / "server", monkeypatch.setattr)
    answer = client.generate
    monkeypatch.setattr(client, "generate", lambda prompts, n, *rest, **more: answer(prompts, n + 1, *rest, **more))
    with pytest.raises(RolloutError, match="20 completions were sampled for 16 prompts"):
        make(tmp_path / "run", **SERVER).train()


@pytest.mark.full
def test_rows_whose_tokens_differ_after_an_answer_are_asked_for_one_by_one(tmp_path, monkeypatch):
    client = stand_in(tmp_path / "server", monkeypatch.setattr)
    asked, answer = [], client.generate

    def generate(prompts: Any, n: int, *rest: Any, **more: Any) -> Any:
        asked.append(n)
        return answer(prompts, n, *rest, **more)

    monkeypatch.setattr(client, "generate", generate)
    log = first_line(tmp_path / "run", **SERVER, **always_calling())
    assert set(asked) == {4, 1}
    assert log["tools/call_frequency"] > 0
    assert log["sampling/sampling_logp_difference/mean"] < METRIC  # the engine continued the rows that are trained
