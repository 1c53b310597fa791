"""The compact decoding loop samples what transformers' loop samples for the same keys, with less work."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from grpo_ext.algorithms.keyed_random import TRAIN_STREAM, completion_keys
from grpo_ext.sampling.decoding import decodes_compactly
from tests.support.architectures import HYBRID, architecture
from tests.support.rollouts import sampled_chunk
from tests.support.tiny import tiny_model
from tests.support.vllm_weights import adapted

FEW = ("qwen2", "gpt2", "gemma2", "lfm2")
FURTHER = tuple(kind for kind in ("llama", "lora", "moe", *HYBRID, "jamba") if kind not in FEW)
ENDS = [1, 7, 11, 23]
PROMPTS = [p for p in ([5, 6, 7], [8], [9, 10, 12, 13, 14]) for _ in range(6)]


def model_of(kind: str) -> Any:
    if kind in (*HYBRID, "jamba", "gemma2"):  # whose cache forgets what is out of the window
        return architecture(kind).eval()
    return (adapted("lora") if kind == "lora" else tiny_model(kind)).eval()


def sample(model: Any, compact: bool, seed: int = 0) -> list[list[int]]:
    rows = torch.arange(len(PROMPTS))
    keys = completion_keys(seed, TRAIN_STREAM, 0, 0, rows // 6, rows % 6)
    config = GenerationConfig(do_sample=True, pad_token_id=0, eos_token_id=ENDS, max_new_tokens=40, top_k=0)
    return sampled_chunk(model, PROMPTS, keys, config, ENDS, compact=compact)


@pytest.mark.parametrize("kind", [*FEW, *(pytest.param(kind, marks=pytest.mark.full) for kind in FURTHER)])
def test_the_same_keys_give_the_same_completions(kind):
    model = model_of(kind)
    found = sample(model, compact=True)
    assert found == sample(model, compact=False)
    assert len({len(row) for row in found}) > 4  # answers of many lengths, so rows have left
    assert found != sample(model, compact=True, seed=1)


def forwards(model: Any, compact: bool) -> list[tuple[int, int]]:
    """Rows and columns of every forward."""
    seen: list[tuple[int, int]] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda m, args, out: seen.append(tuple(args[0].shape)))
    sample(model, compact)
    handle.remove()
    return seen


def test_prompts_run_once_and_finished_rows_leave():
    model = model_of("qwen2")
    ours, theirs = forwards(model, True), forwards(model, False)
    assert ours[0] == (3, 5)
    assert theirs[0] == (18, 5)
    rows = [n for n, _ in ours[1:]]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 18 == theirs[-1][0]
    assert sum(rows) < 0.8 * sum(n for n, _ in theirs[1:])


def test_settings_and_models_that_keep_all_rows_are_left_to_transformers():
    model, plain = model_of("lora"), GenerationConfig()
    assert decodes_compactly(model, plain)
    for setting in ({"cache_implementation": "static"}, {"use_cache": False}, {"prefill_chunk_size": 8}):
        assert not decodes_compactly(model, GenerationConfig(**setting)), setting
    assert not decodes_compactly(architecture("minimax"), plain)  # which has a cache of its own
    model.peft_config["default"].alora_invocation_tokens = [5]  # looks for tokens in every row
    assert not decodes_compactly(model, plain)
