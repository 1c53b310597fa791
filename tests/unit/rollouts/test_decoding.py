"""The compact decoding loop samples what transformers' loop samples for the same keys, with less work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from grpo_ext.algorithms.keyed_random import TRAIN_STREAM, completion_keys
from grpo_ext.rollouts.decoding import decodes_compactly, remaining_rows
from tests.support.architectures import HYBRID, architecture
from tests.support.rollouts import sampled_chunk
from tests.support.tiny import tiny_model

FEW = ("qwen2", "llama", "gpt2", "moe", "gemma2", "lora", "lfm2", "falcon_h1")
FURTHER = tuple(kind for kind in (*HYBRID, "jamba") if kind not in FEW)
PAD, ENDS = 0, [1, 7, 11, 23]
PROMPTS = [p for p in ([5, 6, 7], [8], [9, 10, 12, 13, 14]) for _ in range(6)]


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind in (*HYBRID, "jamba", "gemma2"):  # whose cache forgets what is out of the window
        return architecture(kind).eval()
    model = tiny_model("qwen2" if kind == "lora" else kind).eval()
    if kind == "lora":
        adapter = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(model, adapter).eval()
    return model


def sample(model: Any, compact: bool, seed: int = 0, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    rows = torch.arange(len(prompts))
    keys = completion_keys(seed, TRAIN_STREAM, 0, 0, rows // 6, rows % 6)
    settings = {"do_sample": True, "pad_token_id": PAD, "eos_token_id": ENDS, "max_new_tokens": 40, "top_k": 0}
    config = GenerationConfig(**{**settings, **options})
    return sampled_chunk(model, prompts, keys, config, ENDS, compact=compact)


@pytest.mark.parametrize("kind", [*FEW, *(pytest.param(kind, marks=pytest.mark.full) for kind in FURTHER)])
def test_the_same_keys_give_the_same_completions(kind):
    model = model_of(kind)
    found = sample(model, compact=True)
    assert found == sample(model, compact=False)
    assert len({len(row) for row in found}) > 4  # answers of many lengths, so rows have left
    assert found != sample(model, compact=True, seed=1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 9},
        {"no_repeat_ngram_size": 2},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_settings_mean_the_same(options):
    model = model_of("qwen2")
    assert sample(model, compact=True, **options) == sample(model, compact=False, **options)


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


@given(st.lists(st.booleans(), max_size=20))
def test_rows_that_stay_are_in_the_order_once_and_few_move(done):
    index, places = (part.tolist() for part in remaining_rows(done, torch.device("cpu")))
    assert sorted(index) == [row for row, ended in enumerate(done) if not ended]
    assert places == [place for place, row in enumerate(index) if place != row]
    assert all(done[place] for place in places)


@pytest.mark.parametrize(
    "setting", [{"cache_implementation": "static"}, {"use_cache": False}, {"prefill_chunk_size": 8}]
)
def test_settings_that_keep_all_rows_are_left_to_transformers(setting):
    assert decodes_compactly(model_of("qwen2"), GenerationConfig())
    assert not decodes_compactly(model_of("qwen2"), GenerationConfig(**setting))


def test_models_that_keep_all_rows_are_left_to_transformers():
    assert not decodes_compactly(architecture("minimax"), GenerationConfig())  # which has a cache of its own
    model = model_of("lora")
    assert decodes_compactly(model, GenerationConfig())
    model.peft_config["default"].alora_invocation_tokens = [5]  # looks for tokens in every row
    assert not decodes_compactly(model, GenerationConfig())
