"""The planning table: what it says of memory against what a step takes, and how engines share it."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_ext.batching.micro_batches import Form
from grpo_ext.batching.sizes import geometry_of
from grpo_ext.config import forms_of
from grpo_ext.errors import ConfigError, DataError, ModelError
from grpo_ext.forward.architecture import exchanged_numbers
from grpo_ext.forward.token_slice import to_heads, to_tokens
from grpo_ext.tools.cli import Engine
from grpo_ext.tools.measured_memory import measured_memory, peak_bytes
from grpo_ext.tools.memory import MemoryLayout, ModelSizes, memory_of
from grpo_ext.tools.plan import (
    expected_memory,
    in_units,
    largest_micro_batch,
    load_config,
    refuse_size,
    sizes_of,
    sizes_taken,
    teacher_bytes,
    what_fits,
)
from tests.bench.shapes import MODELS, decoder
from tests.support.architectures import architecture
from tests.support.cases import BITS, QUANTISED, quantised_model

SMALL = {**decoder("qwen2", 2048, 128, 384, 6, 4, 2), "pad_token_id": 0, "eos_token_id": 1}
QWEN = {**MODELS["qwen2.5-0.5b"], "num_hidden_layers": 6}  # a quarter of the layers
# small, with as little else as possible beside what the process holds anyway
MEASURED = decoder("llama", 16384, 640, 1792, 12, 10, 5)


@pytest.mark.full  # twenty seconds in an interpreter of its own; the arithmetic below is that of the formula
def test_the_formula_is_one_to_one_and_a_half_times_what_is_measured(tmp_path):
    """In training and in sampling. What it says of other models and settings is out of these bounds."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MEASURED))
    run = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 4, "bf16": False}
    geometry = geometry_of({**run, "global_batch_size": 8}, 1)
    measured = peak_bytes({**run, "model_name_or_path": str(path)}, geometry, prompt=60)
    sizes, layout = sizes_of(load_config(str(path)), compute="float32"), MemoryLayout("ddp", 1, 76, 8 * 64, 8)
    others = (replace(sizes, trained=0), replace(sizes, parameters=2 * sizes.parameters, trained=2 * sizes.trained))
    for phase in ("training", "rollout"):
        ratio, fewer, larger = (memory_of(each, layout)[phase] / measured[phase] for each in (sizes, *others))
        print(f"{phase}: measured {in_units(measured[phase])}, expected {ratio:.2f} times that")
        assert fewer < 1 <= ratio < 1.5 < larger


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


def test_the_arithmetic_is_what_a_whole_model_holds():
    """A step of all layers on fake tensors, which have sizes and no memory."""
    tokens, config = 1024, AutoConfig.for_model(**QWEN)
    sizes = sizes_of(config)
    layouts = (MemoryLayout(*on, tokens, 1, checkpointing=False) for on in (("ddp", 1), ("fsdp2", 8)))
    one, eight = (memory_of(sizes, layout) for layout in layouts)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        activations, casts = saved_by(model, tokens)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        states = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
        assert one["weights"] == sum(p.nbytes for p in model.parameters())
        # that of the head exists twice
        assert one["gradients"] == sum(p.grad.nbytes for p in model.parameters()) + model.lm_head.weight.nbytes
        assert one["optimizer"] == sum(value.nbytes for value in states)
        layers = sum(p.numel() for p in model.model.layers.parameters())
        outside = sum(p.numel() for p in model.parameters()) - layers
        shards = sum(-(-p.size(0) // 8) * p[0].nbytes for p in model.parameters())  # FSDP2 cuts the first dimension
    assert eight["optimizer"] == pytest.approx(2 * shards, rel=1e-3)
    # and what is reduced last, in bfloat16 and float32
    assert eight["gradients"] == pytest.approx(shards + 6 * outside + model.lm_head.weight.nbytes, rel=1e-3)
    print(f"{one['activations'] / activations:.3f} of the saved activations")
    assert 1 <= one["activations"] / activations < 1.5
    assert one["half-precision copies"] >= casts


SIZES = ModelSizes(
    **{"parameters": 10**9, "trained": 10**9, "largest_layer": 3 * 10**7, "outside": 0, "head": 0, "active": 10**9},
    **{"layers": 24, "hidden": 2048, "vocabulary": 32000, "cached": 25_000, "compute_bytes": 2},
    **{"quantised": 0, "quantised_bytes": 0.0, "form": "packed", "form_in_words": ""},
)


def test_memory_is_divided_as_each_engine_shards_it():
    parts = {engine: memory_of(SIZES, MemoryLayout(engine, 8, 4096, 64 * 1024)) for engine in Engine}
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
    assert parts["ddp"]["training"] > parts["zero2"]["training"] > parts["zero3"]["training"]


def test_a_teacher_is_counted_in_the_type_that_it_is_loaded_in(tmp_path):
    for engine, held in (("ddp", 6 * 10**9), ("zero2", 6 * 10**9), ("fsdp2", 6 * 10**9 / 8)):
        with_teacher, without = (
            memory_of(SIZES, MemoryLayout(engine, 8, 4096, 64, **teacher)) for teacher in ({"teacher": 6 * 10**9}, {})
        )
        assert with_teacher["weights"] - without["weights"] == held
        for part in ("training", "rollout"):
            assert with_teacher[part] - without[part] == pytest.approx(1.1 * held)
    AutoConfig.for_model(**QWEN).save_pretrained(tmp_path / "teacher")
    AutoConfig.for_model(**SMALL).save_pretrained(tmp_path / "policy")
    settings = {"teacher_model": str(tmp_path / "teacher"), "teacher_model_init_kwargs": {"dtype": "bfloat16"}}
    _, table = expected_memory(str(tmp_path / "policy"), geometry_of({}, 1), settings, "ddp", None, None)
    shown = dict(zip(*(column.cells for column in table.columns), strict=True))
    with torch.device("meta"):
        count, policy = (
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**c)).num_parameters() for c in (QWEN, SMALL)
        )
    assert shown["weights"] == in_units(2 * count + 4 * policy)
    for load, each in ((None, 4), ('{"dtype": "float16"}', 2), ({"dtype": "auto"}, 4)):
        assert teacher_bytes({**settings, "teacher_model_init_kwargs": load}) == each * count


@pytest.mark.skipif(not QUANTISED, reason="needs bitsandbytes: pip install '.[quantized]'")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_counted_as_they_are_held(tmp_path, bits):
    model = quantised_model(BITS[f"{bits}bit"], tmp_path)
    held = sum(p.nbytes for p in model.parameters())
    held += sum(p.quant_state.absmax.nbytes for p in model.parameters() if hasattr(p, "quant_state"))
    settings: dict[str, Any] = {"compute": "float32", "lora_rank": 4}
    layout = MemoryLayout("ddp", 1, 64, 4 * 32)
    sizes, plain_sizes = (sizes_of(model.config, **settings, bits=n) for n in (bits, None))
    found, plain = (memory_of(each, layout) for each in (sizes, plain_sizes))
    adapter = 4 * sizes.trained
    assert found["weights"] - adapter == held < (plain["weights"] - adapter) / 2
    assert found["activations"] == plain["activations"]


def test_the_form_decides_how_many_tokens_there_are():
    geometry = geometry_of({"global_batch_size": 16, "per_device_train_batch_size": 16}, 1)
    sizes = {}
    for kind, forward in (("llama", "auto"), ("lfm2", "auto"), ("llama", "padded")):
        form = sizes_of(architecture(kind).config, compute="float32", forms=forms_of(forward)).form
        sizes[form] = largest_micro_batch(geometry, 100, 20, form, None)
    assert sizes == {"packed": 200 + 320, "prefix": 200 + 320, "padded": 1600 + 320}
    assert largest_micro_batch(geometry, 100, 20, "packed", 300) == 300
    assert largest_micro_batch(geometry, 100, 20, "packed", 50) == 120  # a completion runs whole


def test_processes_that_share_a_pack_divide_activations_and_logits_alone():
    whole = MemoryLayout("fsdp2", 8, 4098, 64 * 1024)
    one, shared = (memory_of(SIZES, replace(whole, sequence_parallel_size=size)) for size in (1, 4))
    # a slice of 1025 tokens: the inputs of 24 layers in float32, one layer that is recomputed, and the logits
    assert shared["activations"] == pytest.approx(1025 * (24 * 2048 * 4 + 4 * 10**9 / 2048 / 24 + 24 * 2048))
    assert shared["logits"] == 1025 * 32000 * 12
    assert one["activations"] == pytest.approx(4098 / 1025 * shared["activations"])
    assert {name for name in one if one[name] != shared[name]} == {"activations", "logits", "training"}
    assert one["rollout"] == shared["rollout"]


def test_processes_that_share_a_pack_count_as_one_in_the_largest_micro_batch():
    tokens = []
    for size in (1, 4):
        geometry = geometry_of({"global_batch_size": 16, "sequence_parallel_size": size}, 8)
        tokens.append(largest_micro_batch(geometry, 100, 20, "packed", None))
    assert tokens == [100 + 2 * 20, 100 + 8 * 20]


class Exchanged:
    """A group of `size` that counts what it is asked to exchange."""

    def __init__(self, size: int) -> None:
        self.size, self.numbers, self.calls = size, 0, 0

    def swap(self, parts: torch.Tensor) -> torch.Tensor:
        self.numbers, self.calls = self.numbers + parts.numel(), self.calls + 1
        return parts


@pytest.mark.parametrize(
    ("size", "keys", "half", "repeats"),
    [(2, 2, False, 1), (2, 2, True, 1), (2, 1, False, 2), (2, 1, True, 4), (4, 2, True, 2)],
)
def test_a_plan_counts_what_a_layer_exchanges(size, keys, half, repeats):
    config, group, tokens = AutoConfig.for_model(**SMALL | {"num_key_value_heads": keys}), Exchanged(size), 6
    query, key = torch.zeros(1, 4, tokens, 32), torch.zeros(1, keys, tokens, 32)  # 4 heads of 32
    query, _, _ = to_heads(group, (query, key, key), half)
    to_tokens(group, query.transpose(1, 2))
    assert exchanged_numbers(config, size, half) == 2 * 128 + 2 * keys * 32 * repeats == group.numbers / tokens
    assert group.calls == 2


def fits(device: float, sizes: list[int], tokens: int = 8 * 65536) -> str:
    return what_fits(SIZES, MemoryLayout("ddp", 8, tokens, 0), 65536, sizes, device)


def test_a_plan_suggests_the_smallest_size_with_which_a_completion_fits():
    """18 GB of weights and their gradients; activations of a completion 21.4, 10.7 and 5.4 GB; logits 0.4 GB; slack."""
    assert fits(44, [1], tokens=65536) == "Training fits 44 GB; the rollout's memory is below."
    assert "not fit 44 GB; with sequence_parallel_size=1 and per_device_train_batch_size=1" in fits(44, [1, 2, 4])
    assert "not fit 32 GB; with sequence_parallel_size=2 and" in fits(32, [1, 2, 4])
    assert "not fit 26 GB; with sequence_parallel_size=4 and" in fits(26, [1, 2, 4])
    none = "Training does not fit 26 GB: one completion takes 29.9 GiB with sequence_parallel_size=2, the largest"
    assert fits(26, [1, 2]).startswith(none)


def test_only_sizes_that_a_run_takes_are_suggested():
    config = AutoConfig.for_model(**SMALL)  # 4 heads

    def taken(engine: str = "ddp", form: Form = "packed", processes: int = 8, **settings: Any) -> list[int]:
        layout = MemoryLayout(engine, processes, 100, 0)
        return sizes_taken(config, replace(SIZES, form=form), layout, settings)

    assert taken() == taken("fsdp2") == [1, 2, 4]
    assert taken(processes=6) == [1, 2]
    assert taken("zero3") == taken(form="padded") == taken(rollout_lag=1) == [1]
    with pytest.raises(ModelError, match="has 4 attention heads, which 8 processes cannot share evenly"):
        refuse_size(8, config, SIZES, MemoryLayout("ddp", 8, 100, 0), {})


@pytest.mark.parametrize("setting", ["rollout_lag", "use_vllm", "load_in_4bit", "engine", "sequence_parallel_size"])
def test_what_one_process_does_not_show_is_not_measured(setting):
    settings = {} if setting == "engine" else {setting: 2}
    geometry = geometry_of({"sequence_parallel_size": 2} if "parallel" in setting else {}, 2)
    with pytest.raises(ConfigError, match=f"--measure runs one process, without {setting}; leave out one of the two"):
        measured_memory(settings, geometry, "fsdp2" if setting == "engine" else "ddp", None)


def test_memory_is_counted_for_models_of_text(tmp_path):
    with pytest.raises(ConfigError, match="has no readable configuration"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(ConfigError, match="is a LlavaConfig, but memory is estimated for text models only"):
        load_config(str(tmp_path / "config.json"))


SHORT = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1}
LEARNED = {"model_type": "gpt2", "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 1, **SHORT}
ROTARY = {**decoder("llama", 64, 8, 8, 1, 1, 1), "max_position_embeddings": 64, **SHORT}


@pytest.mark.parametrize(("config", "room"), [(LEARNED, 54), (ROTARY, 64)], ids=["learned", "rotary"])
def test_a_prompt_beyond_the_positions_of_the_model_is_refused_as_by_training(tmp_path, config, room):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    settings = {"max_completion_length": 10}
    for prompt, shown in ((room, f"{room} tokens (as set)"), (None, f"{room} tokens (assumed)")):
        text, _ = expected_memory(str(path), geometry_of({}, 1), settings, "ddp", prompt, None)
        assert f"Prompts: up to {shown}" in text
    says = rf"the longest prompt has {room + 1} tokens, but the model has room for {room} \(max_position_embeddings=64"
    with pytest.raises(DataError, match=says):
        expected_memory(str(path), geometry_of({}, 1), settings, "ddp", room + 1, None)


def test_completions_that_leave_no_position_for_a_prompt_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LEARNED))
    with pytest.raises(DataError, match=r"has 1 token, .*room for -6 .*or lower max_completion_length\."):
        expected_memory(str(path), geometry_of({}, 1), {"max_completion_length": 70}, "ddp", None, None)
