"""Training in half precision on a GPU, with a model of 0.5B shape: the loss scale, memory, and the split."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.precision.loss_scaler import LossScaler
from grpo_ext.tools.plan import MemoryLayout, measure, memory_of
from tests.support.gpu import TOY, needs_gpu
from tests.support.rollouts import give_completions
from tests.support.tiny import letter_reward, tiny_tokenizer

pytestmark = [pytest.mark.gpu, needs_gpu]
fp16 = pytest.mark.skipif(TOY, reason="no fp16 on the CPU")
PRECISIONS = [pytest.param("fp16", marks=fp16), "bf16"]
HALF_B: dict[str, Any] = {  # Qwen2.5 0.5B
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
SMALL = {**HALF_B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
if TOY:
    HALF_B = SMALL = {**SMALL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
PROMPT, COMPLETION, GROUP = (16, 40, 8) if TOY else (128, 128, 8)


def train(folder: Path, shape: dict[str, Any], **settings: Any) -> tuple[GRPOTrainer, torch.Tensor]:
    """A trainer after its run, and the update; completions are given, so that nothing is sampled in half precision."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    sizes = {"global_batch_size": 32, "num_generations": GROUP, "per_device_train_batch_size": 8, **settings}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=torch.float32),
        reward_funcs=letter_reward,
        args=GRPOConfig(
            str(folder),
            max_completion_length=COMPLETION,
            max_steps=3,
            learning_rate=1e-5,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **sizes,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["abcd" * (PROMPT // 4)] * 12, "answer": ["a"] * 12}),
        processing_class=tiny_tokenizer(),
    )
    rows = [[10 + (7 * row + 3 * i) % 30 for i in range(COMPLETION - row)] for row in range(32)]
    give_completions(trainer, rows)
    before = [p.detach().cpu().clone() for p in trainer.model.parameters()]
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    pairs = zip(trainer.model.parameters(), before)
    return trainer, torch.cat([(p.detach().cpu().double() - old.double()).flatten() for p, old in pairs])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_of_half_a_billion_weights_trains(record_property, tmp_path, precision):
    trainer, update = train(tmp_path, HALF_B, fp16=precision == "fp16", bf16=precision == "bf16")
    assert bool(torch.isfinite(update).all())
    assert float(update.norm()) > 0
    assert isinstance(trainer.accelerator.scaler, LossScaler) == (precision == "fp16")
    config = Qwen2Config(**HALF_B)
    sizes = measure(config, compute="float16" if precision == "fp16" else "bfloat16")
    expected = memory_of(sizes, MemoryLayout("ddp", 1, PROMPT + GROUP * COMPLETION, 1))["training"]
    peak = expected if TOY else torch.cuda.max_memory_allocated()
    record_property("expected GiB", expected / 2**30)
    record_property("peak GiB", peak / 2**30)
    assert 0.7 < expected / peak < 1.3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_split_matters_no_more_than_rounding(record_property, tmp_path, precision):
    half = {"fp16": precision == "fp16", "bf16": precision == "bf16"}
    exact = train(tmp_path / "float32", SMALL, fp16=False, bf16=False, per_device_train_batch_size=32)[1]
    large = train(tmp_path / "large", SMALL, per_device_train_batch_size=32, **half)[1]
    small = train(tmp_path / "small", SMALL, per_device_train_batch_size=3, **half)[1]
    noise, split = (large - exact).norm() / exact.norm(), (small - large).norm() / large.norm()
    record_property("against float32", float(noise))
    record_property("between splits", float(split))
    assert split < 2 * noise


@fp16
def test_a_step_that_overflows_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(LossScaler, "value", 2.0**32)
    monkeypatch.setattr(LossScaler, "hysteresis", 1)
    trainer, _ = train(tmp_path, SMALL, fp16=True, bf16=False)
    line = [line for line in trainer.state.log_history if "fp16/loss_scale" in line][-1]
    assert line["fp16/skipped_steps"] >= 1
    assert line["fp16/loss_scale"] < 2.0**32
