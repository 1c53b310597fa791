"""Training on a GPU, mostly a model of 0.5B shape: TF32, memory, the split, bits, adapters, the loss scale, forms."""

import gc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.forward import lm_head
from grpo_ext.precision.loss_scaler import LossScaler
from grpo_ext.tools.memory import MemoryLayout, memory_of
from grpo_ext.tools.plan import sizes_of
from tests.bench.shapes import MODELS
from tests.support.gpu import DEVICE, TOY, needs_gpu
from tests.support.rollouts import give_completions
from tests.support.tiny import letter_reward, tiny_tokenizer

pytestmark = [pytest.mark.gpu, needs_gpu]
fp16 = pytest.mark.skipif(TOY, reason="no fp16 on the CPU")
PRECISIONS = [pytest.param("fp16", marks=fp16), "bf16"]
HALF_B = {**MODELS["qwen2.5-0.5b"], "pad_token_id": 0, "eos_token_id": 1}
SMALL = {**HALF_B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
if TOY:
    HALF_B = SMALL = {**SMALL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
PROMPT, COMPLETION, GROUP = (16, 40, 8) if TOY else (128, 128, 8)


class Trained(NamedTuple):
    trainer: GRPOTrainer
    update: torch.Tensor  # of all parameters, float64
    peak: int  # bytes of device memory in training; 0 in a rehearsal


def train(folder: Path, shape: dict[str, Any], adapter: Any = None, sampled: bool = False, **settings: Any) -> Trained:
    """Train; unless `sampled`, completions are given."""
    gc.collect()
    torch.cuda.empty_cache()
    sizes = {"global_batch_size": 32, "num_generations": GROUP, "per_device_train_batch_size": 8}
    sizes |= {"max_steps": 3, "learning_rate": 1e-5, **settings}
    quiet: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    # before CUDA starts, which reads a setting of bitwise mode then
    args = GRPOConfig(str(folder), max_completion_length=COMPLETION, **quiet, **sizes)
    torch.manual_seed(0)
    with torch.device(DEVICE):  # half a billion random numbers take the CPU a while
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.float32)
    data = Dataset.from_dict({"prompt": ["abcd" * (PROMPT // 4)] * 12, "answer": ["a"] * 12})
    parts: Any = {"processing_class": tiny_tokenizer(), "peft_config": adapter}
    trainer = GRPOTrainer(model, letter_reward, args=args, train_dataset=data, **parts)
    rows = [[10 + (7 * row + 3 * i) % 30 for i in range(COMPLETION - row)] for row in range(32)]
    if not sampled:
        give_completions(trainer, rows)
    before = [p.detach().cpu().clone() for p in trainer.model.parameters()]
    if not TOY:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = 0 if TOY else torch.cuda.max_memory_allocated()
    pairs = zip(trainer.model.parameters(), before)
    update = torch.cat([(p.detach().double() - old.to(DEVICE).double()).flatten() for p, old in pairs])
    return Trained(trainer, update, peak)


@pytest.mark.skipif(TOY, reason="TF32 is a mode of CUDA devices")
def test_tf32_trains(record_property, tmp_path):
    plain, tf32 = (train(tmp_path / str(on), SMALL, bf16=False, tf32=on).update for on in (False, True))
    record_property("TF32 against float32", float((tf32 - plain).norm() / plain.norm()))
    assert not torch.equal(plain, tf32)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_of_half_a_billion_weights_trains(record_property, tmp_path, precision):
    trainer, update, peak = train(tmp_path, HALF_B, fp16=precision == "fp16", bf16=precision == "bf16")
    assert bool(torch.isfinite(update).all())
    assert float(update.norm()) > 0
    assert isinstance(trainer.accelerator.scaler, LossScaler) == (precision == "fp16")
    config = AutoConfig.for_model(**HALF_B)
    sizes = sizes_of(config, compute="float16" if precision == "fp16" else "bfloat16")
    expected = memory_of(sizes, MemoryLayout("ddp", 1, PROMPT + GROUP * COMPLETION, 1))["training"]
    peak = expected if TOY else peak
    record_property("expected GiB", expected / 2**30)
    record_property("peak GiB", peak / 2**30)
    assert 1.0 <= expected / peak < 1.5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_split_matters_no_more_than_rounding(record_property, tmp_path, precision):
    half = {"fp16": precision == "fp16", "bf16": precision == "bf16"}
    exact = train(tmp_path / "float32", SMALL, fp16=False, bf16=False, per_device_train_batch_size=32).update
    large = train(tmp_path / "large", SMALL, per_device_train_batch_size=32, **half).update
    small = train(tmp_path / "small", SMALL, per_device_train_batch_size=3, **half).update
    noise, split = (large - exact).norm() / exact.norm(), (small - large).norm() / large.norm()
    record_property("against float32", float(noise))
    record_property("between splits", float(split))
    assert split < 2 * noise


def test_splits_of_whole_groups_differ_by_what_the_forward_leaves(record_property, tmp_path):
    """On a GPU kernels are chosen by the shapes of products, so that a forward may round otherwise."""

    def update(size: int, on: bool) -> torch.Tensor:
        settings = {"optim": "sgd", "learning_rate": 10.0, "max_grad_norm": 0.0, "max_steps": 1, "bf16": True}
        settings |= {"per_device_train_batch_size": size, "float32_weight_gradients": on}
        return train(tmp_path / f"{size}-{on}", HALF_B, **settings).update.float()

    apart = {}
    for on in (True, False):
        large = update(32, on)
        for size in (16, 3):
            apart[size, on] = float((update(size, on) - large).norm() / large.norm())
            what = f"{'whole' if size % GROUP == 0 else 'cut'} groups" + ("" if on else ", rounded weight gradients")
            record_property(what, apart[size, on])
    assert apart[16, True] < apart[16, False]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}], ids=str)
def test_two_splits_have_the_same_bits_in_bitwise_mode(monkeypatch, tmp_path, filters):
    """With the tiled head: TRL's Triton head is not used in this mode."""
    monkeypatch.setattr(lm_head, "triton_head", lambda: pytest.fail("TRL's Triton head was asked for"))
    settings = {"bitwise_invariant": True, "sampled": True, **filters}
    eight, three = (
        train(tmp_path / str(size), SMALL, per_device_train_batch_size=size, **settings).update for size in (8, 3)
    )
    assert torch.equal(eight, three)
    other = train(tmp_path / "seed", SMALL, seed=1, **settings).update
    assert not torch.equal(eight, other)


def test_an_adapter_trains_alone(tmp_path):
    adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    trainer, update, _ = train(tmp_path, HALF_B, adapter, sampled=True)
    trained = torch.cat([p.new_full((p.numel(),), p.requires_grad) for p in trainer.model.parameters()]).bool()
    assert bool(torch.isfinite(update).all())
    assert float(update[trained].norm()) > 0
    assert float(update[~trained].norm()) == 0


@fp16
def test_a_step_that_overflows_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(LossScaler, "initial", 2.0**32)
    monkeypatch.setattr(LossScaler, "hysteresis", 1)
    trainer = train(tmp_path, SMALL, fp16=True, bf16=False).trainer
    line = [line for line in trainer.state.log_history if "fp16/loss_scale" in line][-1]
    assert line["fp16/skipped_steps"] >= 1
    assert line["fp16/loss_scale"] < 2.0**32


@pytest.mark.parametrize("form", ["prefix", "padded"])
def test_a_step_of_half_a_billion_weights_is_that_of_packs(record_property, tmp_path, form):
    one, other = (train(tmp_path / name, HALF_B, forward=name, max_steps=1).update for name in ("packed", form))
    agreement = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
    record_property("cosine of the updates", agreement)
    assert agreement > 0.9  # Adam's first step is the sign of each element's gradient, and bfloat16 turns small ones
