"""Sampling on a GPU: tokens by blocks of the vocabulary, rows that end between two looks."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

from grpo_ext.algorithms.keyed_random import choose, choose_by_blocks
from grpo_ext.precision.half import half_weights
from tests.support.gpu import DEVICE, TOY, needs_gpu
from tests.support.rollouts import sampled_chunk

pytestmark = [pytest.mark.gpu, needs_gpu]
VOCABULARY = 1000 if TOY else 151936
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("deterministic", [False, True])
def test_sampled_tokens_are_those_of_the_cpu(deterministic):
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(256, VOCABULARY, generator=generator)
    scores[:, ::7] = -torch.inf
    u = torch.rand(256, generator=generator, dtype=torch.float64)
    torch.use_deterministic_algorithms(deterministic)
    try:
        tokens = choose_by_blocks(scores.to(DEVICE), u.to(DEVICE))[0].cpu()
    finally:
        torch.use_deterministic_algorithms(False)
    assert (tokens != choose(scores, u)[0]).sum() <= 1  # float32 moves a boundary by 1e-7
    assert (tokens != choose(scores, 1 - u)[0]).sum() > 100


@pytest.mark.parametrize("half", [False, True])
def test_sampled_completions_do_not_depend_on_rows_that_leave(half):
    """Against transformers' loop, with the same keys: rows of float32, in half precision most of them."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": 60, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes)).to(DEVICE).eval()
    prompts = [[5, 6, 7 + group] for group in range(4) for _ in range(8)]
    keys_B, ends = torch.arange(32) * 7919, [1, 2, 3]
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=60, pad_token_id=0, eos_token_id=ends)
    arguments = (prompts, keys_B, config, ends, DEVICE)
    weights = half_weights(model, torch.bfloat16) if half else nullcontext()
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=half), weights:
        compact, whole = (sampled_chunk(model, *arguments, compact=compact) for compact in (True, False))
    assert len({len(row) for row in compact}) > 4
    assert sum(one == other for one, other in zip(compact, whole)) >= (16 if half else 32)
