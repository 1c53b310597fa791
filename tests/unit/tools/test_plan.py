"""The planning table: what it says of memory against what a step takes, and how engines share it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.batching.sizes import geometry_of
from grpo_ext.config import forms_of
from grpo_ext.errors import ConfigError
from grpo_ext.forward.tiled_log_probs import CPU_TILE
from grpo_ext.tools.cli import ENGINES
from grpo_ext.tools.plan import (
    MemoryLayout,
    ModelSizes,
    largest_micro_batch,
    load_config,
    measure,
    memory_of,
)
from tests.support import forks
from tests.support.architectures import architecture
from tests.support.cases import BITS, QUANTISED, quantised_model
from tests.support.rollouts import give_completions
from tests.support.selection import few_of
from tests.support.tiny import letter_reward, tiny_tokenizer

SMALL: dict[str, Any] = {
    **{"model_type": "qwen2", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "vocab_size": 2048},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    **{"pad_token_id": 0, "eos_token_id": 1},
}


# Qwen2.5, from their configurations: hidden, intermediate, layers, heads, key-value heads, vocabulary
QWEN = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "a quarter of it": (896, 4864, 6, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
}
SAVED_TOLERANCE = 0.15  # attention on fake tensors keeps a copy of its output that the CPU's kernel does not


def qwen(size: str) -> dict[str, Any]:
    """The fields of a config.json."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip((*names, "vocab_size"), QWEN[size]))
    return {"model_type": "qwen2", **sizes, "tie_word_embeddings": size != "7B"}


class SecondStep(TrainerCallback):
    """Profiles the allocations of the second step, whose optimizer state is there already."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profile.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.profile.__exit__(None, None, None)

    def peak(self) -> int:
        """The most bytes held beyond those held at the beginning of the step."""
        events = self.profile.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        held = highest = 0
        for _, change in changes:
            held += change
            highest = max(highest, held)
        return highest


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_memory_of_a_step_is_about_what_was_expected(tmp_path, checkpointing):
    prompt, completion, group = 128, 96, 8
    config = AutoConfig.for_model(**SMALL)
    watch = SecondStep()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_config(config),
        reward_funcs=letter_reward,
        args=GRPOConfig(
            str(tmp_path),
            global_batch_size=16,
            num_generations=group,
            per_device_train_batch_size=group,
            max_completion_length=completion,
            max_steps=2,
            bf16=False,
            gradient_checkpointing=checkpointing,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            optim="adamw_torch",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["abcd" * (prompt // 4)] * 4, "answer": ["a"] * 4}),
        processing_class=tiny_tokenizer(),
        callbacks=[watch],
    )
    rows = [[10 + (7 * row + 3 * i) % 30 for i in range(completion)] for row in range(16)]
    give_completions(trainer, rows)
    trainer.train()
    sizes = measure(config, compute="float32")
    tokens = prompt + group * completion
    tile = CPU_TILE[0] * CPU_TILE[1]
    expected = memory_of(sizes, MemoryLayout("ddp", 1, tokens, 1, checkpointing, head_tile=tile))
    state = sum(v.nbytes for values in trainer.optimizer.state.values() for v in values.values() if v.dim())
    assert expected["optimizer"] == state
    assert expected["weights"] == sum(p.nbytes for p in trainer.model.parameters())
    step = expected["training"] - expected["weights"] - expected["optimizer"]
    print(f"step: expected {step / 2**20:.1f} MiB, measured {watch.peak() / 2**20:.1f} MiB")
    assert 0.75 < step / watch.peak() < 1.25


def saved_by(model: Any, tokens: int) -> tuple[int, int]:
    """Bytes that autograd keeps of a forward in bfloat16: activations, and weights in half precision."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    shapes = {p.shape for p in model.parameters()}
    saved: dict[int, tuple[Any, bool]] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage, tensor.shape in shapes or tensor.shape[::-1] in shapes
        return tensor

    half = torch.autocast("cpu", torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), half:
        output = model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False).last_hidden_state
    output.float().sum().backward()
    activations, casts = (sum(storage.nbytes() for storage, cast in saved.values() if cast == kind) for kind in (0, 1))
    return activations, casts


@pytest.mark.parametrize("size", few_of(QWEN, ("a quarter of it",)))
def test_the_arithmetic_is_what_a_whole_model_holds(size):
    """A step of all layers on fake tensors, which have sizes and no memory."""
    tokens, config = 1024, AutoConfig.for_model(**qwen(size))
    sizes = measure(config)
    one, eight = (
        memory_of(sizes, MemoryLayout(*on, tokens, 1, checkpointing=False)) for on in (("ddp", 1), ("fsdp2", 8))
    )
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        activations, casts = saved_by(model, tokens)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        states = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
        assert one["weights"] == sum(p.nbytes for p in model.parameters())
        assert one["gradients"] == sum(p.grad.nbytes for p in model.parameters())
        assert one["optimizer"] == sum(value.nbytes for value in states)
        assert one["gradient of the head"] == model.lm_head.weight.nbytes
        layers = sum(p.numel() for p in model.model.layers.parameters())
        outside = sum(p.numel() for p in model.parameters()) - layers
        shards = sum(-(-p.size(0) // 8) * p[0].nbytes for p in model.parameters())  # FSDP2 cuts the first dimension
    assert eight["optimizer"] == pytest.approx(2 * shards, rel=1e-3)
    # and what is reduced last, in bfloat16 and float32
    assert eight["gradients"] == pytest.approx(shards + 6 * outside, rel=1e-3)
    print(f"{size}: {one['activations'] / activations:.3f} of the saved activations")
    assert one["activations"] == pytest.approx(activations, rel=SAVED_TOLERANCE)
    assert one["half-precision copies"] >= casts


def test_adapters_are_counted():
    config = AutoConfig.for_model(**qwen("a quarter of it"))
    sizes = measure(config, lora_rank=32)
    one, eight = (memory_of(sizes, MemoryLayout(*on, 1024, 1)) for on in (("ddp", 1), ("fsdp2", 8)))
    with torch.device("meta"):
        adapter = peft.LoraConfig(r=32, target_modules="all-linear")
        model = peft.get_peft_model(AutoModelForCausalLM.from_config(config), adapter)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert one["weights"] == sum(p.nbytes for p in model.parameters())
    assert one["gradients"] == sum(p.nbytes for p in trained) == one["optimizer"] / 2
    assert one["gradient of the head"] == eight["gradient of the head"] == 0
    shards = sum(-(-p.size(0) // 8) * p[0].nbytes for p in trained)  # FSDP2 cuts the first dimension
    assert eight["optimizer"] == pytest.approx(2 * shards, rel=1e-3)


SIZES = ModelSizes(
    parameters=10**9,
    trained=10**9,
    largest_layer=3 * 10**7,
    layers=24,
    hidden=2048,
    vocabulary=32000,
    compute_bytes=2,
    token_bytes=100_000,
    cache_bytes=50_000,
)


def training(engine: str, processes: int, **changes: Any) -> float:
    return memory_of(SIZES, MemoryLayout(engine, processes, 4096, 64 * 1024, **changes))["training"]


def test_engines_share_what_they_share():
    parts = {engine: memory_of(SIZES, MemoryLayout(engine, 8, 4096, 64 * 1024)) for engine in ENGINES}
    assert parts["ddp"]["optimizer"] == 8 * parts["fsdp2"]["optimizer"] == 8 * 10**9
    # DeepSpeed in half precision: 2 bytes of weights and gradients, float32 copies with the optimizer's shards
    assert parts["zero2"]["optimizer"] == parts["zero3"]["optimizer"] == 12 * 10**9 / 8
    assert parts["ddp"]["weights"] == 2 * parts["zero2"]["weights"] == 4 * 10**9
    assert parts["zero2"]["half-precision copies"] == 0 < parts["ddp"]["half-precision copies"]
    assert parts["ddp"]["gradients"] == 16 * parts["zero3"]["gradients"] == 4 * 10**9
    # its part, and what is being reduced: a layer in bfloat16, and in float32
    assert parts["fsdp2"]["gradients"] == 4 * 10**9 / 8 + 6 * 3 * 10**7
    # its part, and two layers that are gathered in half precision
    assert parts["fsdp2"]["weights"] == 4 * 10**9 / 8 + 2 * 2 * 3 * 10**7
    assert len({found["activations"] for found in parts.values()}) == 1
    assert training("ddp", 8) == training("ddp", 1) > training("zero2", 8) > training("zero3", 8)


def test_what_costs_memory_costs_memory():
    assert training("ddp", 1, checkpointing=False) > training("ddp", 1)
    assert training("ddp", 1, reference=True) - training("ddp", 1) == 4 * 10**9
    assert training("ddp", 1, bitwise=True) - training("ddp", 1) == 8 * 10**9 + 64 * 2**20
    # sampled ahead by one: two copies of the weights, those in half precision, and the cache while the step runs
    ahead = 2 * 4 * 10**9 + 2 * 10**9 + 50_000 * 64 * 1024
    assert training("ddp", 1, weights_ahead=2) - training("ddp", 1) == ahead


@pytest.mark.skipif(not QUANTISED, reason="needs bitsandbytes: pip install '.[quantized]'")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_counted_as_they_are_held(tmp_path, bits):
    model = quantised_model(BITS[f"{bits}bit"], tmp_path)
    held = sum(p.nbytes for p in model.parameters())
    held += sum(p.quant_state.absmax.nbytes for p in model.parameters() if hasattr(p, "quant_state"))
    settings: dict[str, Any] = {"compute": "float32", "lora_rank": 4}
    layout = MemoryLayout("ddp", 1, 64, 4 * 32)
    sizes, plain_sizes = (measure(model.config, **settings, bits=n) for n in (bits, None))
    found, plain = (memory_of(each, layout) for each in (sizes, plain_sizes))
    adapter = 4 * sizes.trained
    assert found["weights"] - adapter == held < (plain["weights"] - adapter) / 2
    assert found["activations"] == plain["activations"]


def test_the_form_decides_how_many_tokens_there_are():
    geometry = geometry_of({"global_batch_size": 16, "per_device_train_batch_size": 16}, 1)
    sizes = {}
    for kind, forward in (("llama", "auto"), ("lfm2", "auto"), ("llama", "padded")):
        form = measure(architecture(kind).config, compute="float32", forms=forms_of(forward)).form
        sizes[form] = largest_micro_batch(geometry, 100, 20, form, None)
    assert sizes == {"packed": 200 + 320, "prefix": 200 + 320, "padded": 1600 + 320}
    assert largest_micro_batch(geometry, 100, 20, "packed", 300) == 300
    assert largest_micro_batch(geometry, 100, 20, "packed", 50) == 120  # a completion runs whole


def test_the_command_shows_it(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(SMALL))
    words = ["--processes", "1024", "--engine", "fsdp2", "--global_batch_size", "16384"]
    done = plan("--model_name_or_path", str(path), *words)
    assert done.returncode == 0, done.stderr
    for words in ("memory per device, fsdp2 on 1024", "training", "Largest micro-batch", "1.4M parameters"):
        assert words in done.stdout
    done = plan("--model_name_or_path", str(tmp_path / "gone.json"))
    assert done.returncode == 2
    assert "gives no configuration" in done.stderr.replace("\n", " ")
    with pytest.raises(ConfigError):
        load_config(str(tmp_path))


def plan(*args: str) -> subprocess.CompletedProcess:
    return forks.python("-m", "grpo_ext.tools.cli", "plan", *args)


def test_memory_is_counted_for_models_of_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(ConfigError, match="is a LlavaConfig, and memory is counted for models of text alone"):
        load_config(str(tmp_path / "config.json"))
