"""Options of vLLM's engine that TRL has no argument for."""

from grpo_ext import compat
from grpo_ext.upstream.vllm_engine import starting_vllm_with


def test_an_option_that_trl_passes_too_is_ours(monkeypatch):
    monkeypatch.setattr(compat.vllm_generation, "LLM", dict, raising=False)
    with starting_vllm_with({"logprobs_mode": "processed_logprobs"}):
        started = compat.vllm_generation.LLM(model="tiny", logprobs_mode="raw_logprobs")
    assert started == {"model": "tiny", "logprobs_mode": "processed_logprobs"}
