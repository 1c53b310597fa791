"""The memory of a run's model as text, for `grpo-ext plan`: what it depends on, its parts per device, and what fits."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from ..batching.micro_batches import Form
from ..batching.sizes import BatchGeometry, Settings, ceil_div
from ..config import forms_of
from ..errors import ConfigError, DataError, GrpoExtError, counted
from ..forward.architecture import attention_sizes, exchanged_numbers, weight_sizes
from ..forward.choice import ForwardChoice
from ..forward.token_slice import refuse_heads, refuse_other_forms
from ..upstream.argument_checks import find_model
from ..upstream.data_checks import room_for_prompt
from ..value_checks import check_sequence_parallel
from .memory import FLOAT32, QUANTISED, MemoryLayout, ModelSizes, memory_of

PROMPT_TOKENS = 512  # assumed, where the model has as many positions


def load_config(model: str, setting: str = "model_name_or_path") -> Any:
    """Read the configuration of a model id, a folder, or a JSON file."""
    try:
        if model.endswith(".json"):
            config = AutoConfig.for_model(**json.loads(Path(model).read_text()))
        else:
            find_model(model, {})
            config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{setting}={model!r} has no readable configuration ({reason}); pass a model id, a folder, or a "
            "config.json (without a network, one that was downloaded elsewhere)."
        ) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model_name_or_path={model!r} is a {type(config).__name__}, but memory is estimated for text models "
            "only; pass the text model inside it."
        )
    return config


def sizes_of(
    config: Any,
    *,
    compute: str = "bfloat16",  # dtype of a forward pass
    lora_rank: int | None = None,  # train only adapters of this rank, on every linear layer
    bits: int | None = None,  # store linear layers in 4 or 8 bits (bitsandbytes)
    forms: Sequence[Form] = ("packed", "prefix"),  # that the settings allow, the best first
) -> ModelSizes:
    """Count the sizes of an architecture, without its weights."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters, head = sum(p.numel() for p in model.parameters()), model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    adapters = None if lora_rank is None else sum(lora_rank * (m.in_features + m.out_features) for m in linear)
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == text.num_hidden_layers]
    layers = [sum(p.numel() for p in layer.parameters()) for stack in stacks for layer in stack]
    trains_head = lora_rank is None and head is not None
    choice = ForwardChoice(forms, torch.device("cpu"))
    return ModelSizes(
        parameters=parameters + (adapters or 0),
        trained=parameters if adapters is None else adapters,
        largest_layer=max(layers, default=parameters),
        outside=parameters - sum(layers),
        head=sum(p.numel() for p in head.parameters()) if trains_head else 0,
        active=weight_sizes(model)[0],
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        cached=attention_sizes(config)[1],
        compute_bytes=getattr(torch, compute).itemsize,
        quantised=sum(m.weight.numel() for m in linear) if bits else 0,
        quantised_bytes=QUANTISED[bits] if bits else 0.0,
        form=choice.planned(model),
        form_in_words=choice.described(model),
    )


def tokens_of_prompt(config: Any, longest: int, prompt: int | None) -> int:
    """The tokens of the longest prompt, as set or assumed; a DataError where the model has no positions for them."""
    room, reason = room_for_prompt(config, longest)
    tokens = prompt or max(min(PROMPT_TOKENS, room), 1)
    if tokens > room:
        raise DataError(f"the longest prompt has {counted(tokens, 'token')}, {reason}")
    return tokens


def largest_micro_batch(geometry: BatchGeometry, prompt: int, longest: int, form: Form, budget: int | None) -> int:
    """Tokens in the largest micro-batch, with prompts and completions of maximal length."""
    rows = min(geometry.micro_batch_size, geometry.trained_share)
    groups = rows if form == "padded" else ceil_div(rows, geometry.num_generations)
    tokens = groups * prompt + rows * longest
    return tokens if budget is None else min(tokens, max(budget, prompt + longest))


def refuse_size(size: int, config: Any, model: ModelSizes, layout: MemoryLayout, settings: Settings) -> None:
    """Raise the GrpoExtError of a run in which `size` processes cannot share a micro-batch."""
    deepspeed = layout.engine in ("zero2", "zero3")
    check_sequence_parallel({**settings, "deepspeed": deepspeed, "sequence_parallel_size": size})
    refuse_heads(config, size, layout.processes)
    refuse_other_forms(size, model.form, model.form_in_words)


def sizes_taken(config: Any, model: ModelSizes, layout: MemoryLayout, settings: Settings) -> list[int]:
    """Values of `sequence_parallel_size` from the current one on that a run takes."""
    sizes = []
    for size in range(layout.sequence_parallel_size, layout.processes + 1):
        with suppress(GrpoExtError):
            refuse_size(size, config, model, layout, settings)
            sizes.append(size)
    return sizes


def what_fits(model: ModelSizes, layout: MemoryLayout, completion: int, sizes: Sequence[int], device: float) -> str:
    """Say whether training fits a device, and otherwise the smallest of `sizes` with which one completion does.

    `completion` counts tokens of the longest one and of its prompt. `device` is the GB in the name of a card, in GiB.
    """
    if memory_of(model, layout)["training"] <= device * 1024**3:
        return f"Training fits {device:g} GB; the rollout's memory is below."
    one = replace(layout, tokens=completion)
    needed = {n: memory_of(model, replace(one, sequence_parallel_size=n))["training"] for n in sizes}
    size = next((n for n in sizes if needed[n] <= device * 1024**3), None)
    if size is None:
        least = f"one completion takes {in_units(needed[sizes[-1]])} with sequence_parallel_size={sizes[-1]}"
        return f"Training does not fit {device:g} GB: {least}, the largest that this run can have; use fsdp2 or LoRA."
    remedy = f"with sequence_parallel_size={size} and per_device_train_batch_size=1"
    return f"Training does not fit {device:g} GB; {remedy} it takes {in_units(needed[size])}."


def expected_memory(
    model: str, geometry: BatchGeometry, settings: Settings, engine: str, prompt: int | None, device: float | None
) -> tuple[str, Table]:
    """Describe what the memory depends on, and estimate the memory per device by part.

    `model` is an id, folder or config.json; `prompt` is the tokens of the longest prompt, None if unknown; `device` is
    the GB of a device.
    """
    # bfloat16 is TRL's default
    compute = "float16" if settings.get("fp16") else "bfloat16" if settings.get("bf16", True) else "float32"
    lora_rank = settings.get("lora_r", 16) if settings.get("use_peft") else None
    longest = settings.get("max_completion_length") or 512
    forms, config = forms_of(settings.get("forward", "auto")), load_config(model)
    longest_prompt = tokens_of_prompt(config, longest, prompt)
    bits = next((n for n in QUANTISED if settings.get(f"load_in_{n}bit")), None)
    sizes = sizes_of(config, compute=compute, lora_rank=lora_rank, bits=bits, forms=forms)
    tokens = largest_micro_batch(geometry, longest_prompt, longest, sizes.form, settings.get("micro_batch_tokens"))
    layout = _layout_of(geometry, settings, engine, tokens, longest_prompt + longest)
    shared = layout.sequence_parallel_size
    refuse_size(shared, config, sizes, layout, settings)
    lines = [
        f"Model: {sizes.parameters / 1e6:,.1f}M parameters, {sizes.trained / 1e6:,.1f}M trained",
        f"Forward: {sizes.form_in_words}",
        f"Prompts: up to {longest_prompt} tokens ({'assumed' if prompt is None else 'as set'}); completions: up to "
        f"{longest}",
        f"Largest micro-batch: {tokens:,} tokens",
    ]
    if shared > 1:
        numbers = exchanged_numbers(config, shared, half=sizes.compute_bytes < FLOAT32)
        sent = layout.slice_tokens * numbers * sizes.compute_bytes * (shared - 1) / shared
        what = "two all-to-alls (query, key and value; output)"
        lines.append(f"Exchange: in each layer and pass a device sends {in_units(sent)} in {what}")
    if device is not None:
        taken = sizes_taken(config, sizes, layout, settings)
        lines.append(what_fits(sizes, layout, longest_prompt + longest, taken, device))
    lines.append(f"Expected memory per device, {engine} on {counted(geometry.num_processes, 'process')}:")
    return "\n".join(lines), _table(memory_of(sizes, layout), "rollout" if settings.get("use_vllm") else None)


def teacher_bytes(settings: Settings) -> int:
    """Bytes of a teacher's weights, in the type in which it is loaded; 0 without one."""
    if (teacher := settings.get("teacher_model")) is None:
        return 0
    config, load = load_config(teacher, "teacher_model"), settings.get("teacher_model_init_kwargs") or {}
    load = json.loads(load) if isinstance(load, str) else load
    kind = load.get("dtype", "float32")
    kind = config.dtype if kind == "auto" else getattr(torch, str(kind).removeprefix("torch."))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters() * (kind or torch.float32).itemsize


def _layout_of(geometry: BatchGeometry, settings: Settings, engine: str, tokens: int, completion: int) -> MemoryLayout:
    lag = settings.get("rollout_lag")
    rows = 0 if settings.get("use_vllm") else geometry.generate_size  # vLLM's own memory is not counted
    return MemoryLayout(
        engine,
        geometry.num_processes,
        tokens,
        sampled_rows=rows,
        sampled_tokens=rows * completion,
        accumulates=geometry.accumulation_steps > 1,
        checkpointing=bool(settings.get("gradient_checkpointing", True)),
        reference=settings.get("beta", 0.0) > 0 and not settings.get("use_peft"),
        teacher=teacher_bytes(settings),
        bitwise=bool(settings.get("bitwise_invariant", False)),
        weights_ahead=lag + 1 if lag else 0,  # one for each rollout batch ahead, and one for the current one
        sequence_parallel_size=geometry.sequence_parallel_size,
    )


def _table(memory: Mapping[str, float], without: str | None) -> Table:
    table = Table("part", Column("memory", justify="right"))
    for name, size in memory.items():
        total = name in ("training", "rollout")
        if (size or total) and name != without:
            table.add_row(f"[bold]{name}[/bold]" if total else name, in_units(size))
    return table


def in_units(size: float) -> str:
    """Bytes in the largest fitting unit: "3.2 MiB"."""
    power = max((n for n in (1, 2, 3) if size >= 1024**n), default=0)
    return f"{size / 1024**power:,.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
