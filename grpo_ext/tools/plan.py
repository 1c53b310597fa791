"""Estimates the memory that a training step and a rollout of a model need per device, for `grpo-ext plan`.

`memory_of` is arithmetic on the number of parameters and on what an engine shards. Saved activations are measured
(`measure`): two layers of the architecture, with random weights and a tiny vocabulary, run forward once on the CPU, and
the sizes of all tensors that autograd saves are added up. Sizes in bytes; weights are float32.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from ..batching.micro_batches import Form
from ..batching.sizes import BatchGeometry, ceil_div
from ..config import forms_of
from ..errors import ConfigError, GrpoExtError, counted
from ..forward.architecture import attention_sizes, exchanged_numbers
from ..forward.choice import ForwardChoice
from ..forward.tiled_log_probs import TILE
from ..forward.token_slice import refuse_heads, refuse_other_forms
from ..upstream.argument_checks import find_model
from ..value_checks import check_sequence_parallel

_PROMPT_TOKENS = 512  # assumed
_TOKENS = 192  # in the forward pass that is measured
_WEIGHT_BYTES = 4
_SLICE_BYTES = 64 * 2**20  # a slice of a gradient and its integers, while they are added up (precision.fixed_point)
_QUANTISED_BYTES = {4: 0.5 + 4 / 64, 8: 1.0}  # 4-bit weights have a float32 factor for every 64


@dataclass(frozen=True)
class ModelSizes:
    parameters: int  # all weights
    trained: int  # parameters with a gradient
    largest_layer: int  # parameters; an engine gathers a whole layer
    layers: int
    hidden: int  # width of a layer's input
    vocabulary: int
    compute_bytes: int  # per number in a forward (2: autocast to half precision)
    token_bytes: float  # saved for the backward pass, per token and layer
    cache_bytes: float  # keys and values of all layers while sampling, per token
    quantised: int = 0  # parameters that are stored in `quantised_bytes` each
    quantised_bytes: float = 0.0
    outside: int = 0  # parameters outside of the layers, which FSDP2 gathers for a whole step
    head: int = 0  # trained parameters of the language-model head, whose gradient exists twice
    form: Form = "packed"  # how completions run through the model
    form_in_words: str = ""  # the form, and why not another one


@dataclass(frozen=True)
class MemoryLayout:
    engine: str  # one of `cli.Engine`
    processes: int  # devices that share what the engine shards
    tokens: int  # in the largest micro-batch, prompts included, over all devices that share it
    sampled_tokens: int  # in one `generate` call at maximal length, prompts included
    checkpointing: bool = True  # gradient checkpointing
    reference: bool = False  # a separate reference model is in memory
    teacher: int = 0  # bytes of the teacher's weights
    bitwise: bool = False  # gradients are summed as 64-bit integers
    weights_ahead: int = 0  # copies of the trained weights on this device, to sample ahead
    head_tile: int = TILE[0] * TILE[1]  # logits that the head computes at a time
    sequence_parallel_size: int = 1  # devices that share the tokens of a micro-batch

    @property
    def slice_tokens(self) -> int:
        return ceil_div(self.tokens, self.sequence_parallel_size)


def memory_of(model: ModelSizes, layout: MemoryLayout) -> dict[str, float]:
    """Compute the bytes per device by part, with the totals "training" and "rollout"."""
    deepspeed = layout.engine in ("zero2", "zero3")
    half = model.compute_bytes < _WEIGHT_BYTES
    # DeepSpeed holds weights and gradients in the half precision, and float32 copies with the optimizer's shards
    width = model.compute_bytes if deepspeed else _WEIGHT_BYTES
    masters = _WEIGHT_BYTES if deepspeed and half else 0
    plain = model.parameters - model.quantised
    whole = plain * width + model.quantised * model.quantised_bytes
    shards_weights = layout.engine in ("zero3", "fsdp2")
    # peaks: one layer in use and the next one being gathered; FSDP2 gathers weights outside of the layers once
    gathered, reduced = 2 * model.largest_layer * model.compute_bytes if shards_weights else 0.0, 0.0
    if layout.engine == "fsdp2":
        gathered += model.outside * model.compute_bytes
        # gradients are reduced in every micro-batch: one unit at a time is unsharded, with a float32 copy
        unit = max(model.largest_layer, model.outside) * model.trained / model.parameters
        reduced = unit * (model.compute_bytes + _WEIGHT_BYTES)
    holders = layout.processes if layout.engine != "ddp" else 1  # of gradients and optimizer states
    resident_weights = whole / layout.processes if shards_weights else whole
    casts = plain * model.compute_bytes if half and not deepspeed and not shards_weights else 0
    # with checkpointing the input of every layer is saved, and all of the one layer that is recomputed
    inputs = model.hidden * _WEIGHT_BYTES * model.layers
    saved = inputs + model.token_bytes if layout.checkpointing else model.token_bytes * model.layers
    parts = {
        "weights": resident_weights + gathered,
        "half-precision copies": casts,
        "reference": resident_weights if layout.reference else 0,
        "teacher": layout.teacher / (layout.processes if shards_weights else 1),
        "gradients": (width if deepspeed else 4) * model.trained / holders + reduced,
        "gradient of the head": 4 * model.head,
        "optimizer": (8 + masters) * model.trained / holders,
        "bitwise sums": 8 * model.trained + _SLICE_BYTES if layout.bitwise else 0,
        "activations": layout.slice_tokens * saved,
        # float32 logits and their log-probabilities; in half precision the products too
        "logits": min(layout.slice_tokens * model.vocabulary, layout.head_tile)
        * (8 + (model.compute_bytes if half else 0)),
        "weights that sample": layout.weights_ahead * width * model.trained,
        "key-value cache": model.cache_bytes * layout.sampled_tokens,
    }
    resident = sum(parts[n] for n in ("weights", "reference", "teacher", "optimizer", "weights that sample"))
    in_a_step = ("half-precision copies", "gradients", "gradient of the head", "bitwise sums", "activations", "logits")
    step = resident + sum(parts[n] for n in in_a_step)
    # to generate, TRL gathers the weights of ZeRO-3, FSDP2 gathers layer by layer, and the others hold half copies
    sampling = parts["key-value cache"] + (whole if layout.engine == "zero3" else 0) + (0 if model.quantised else casts)
    if layout.weights_ahead:  # training and sampling at the same time
        return {**parts, "training": step + sampling, "rollout": step + sampling}
    return {**parts, "training": step, "rollout": resident + sampling}


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
        on_the_hub = not Path(model).exists() and model.count("/") <= 1 and not model.endswith(".json")
        download = f"https://huggingface.co/{model}/raw/main/config.json"
        elsewhere = f" Without a network, download {download} elsewhere and pass that file."
        raise ConfigError(
            f"{setting}={model!r} has no readable configuration ({reason}); pass a model id, a folder, or "
            f"a config.json.{elsewhere if on_the_hub else ''}"
        ) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model_name_or_path={model!r} is a {type(config).__name__}, but memory is estimated for text models "
            "only; pass the text model inside it."
        )
    return config


def measure(
    config: Any,
    *,
    compute: str = "bfloat16",  # dtype of a forward pass
    lora_rank: int | None = None,  # train only adapters of this rank, on every linear layer
    bits: int | None = None,  # store linear layers in 4 or 8 bits (bitsandbytes)
    forms: Sequence[Form] = ("packed", "prefix"),  # that the settings allow, the best first
) -> ModelSizes:
    """Measure the sizes of an architecture, without its weights."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters, head = sum(p.numel() for p in model.parameters()), model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    adapters = None if lora_rank is None else sum(lora_rank * (m.in_features + m.out_features) for m in linear)
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == text.num_hidden_layers]
    layers = [sum(p.numel() for p in layer.parameters()) for stack in stacks for layer in stack]
    trains_head = lora_rank is None and head is not None
    size, choice = getattr(torch, compute).itemsize, ForwardChoice(forms, torch.device("cpu"))
    return ModelSizes(
        parameters=parameters + (adapters or 0),
        trained=parameters if adapters is None else adapters,
        largest_layer=max(layers, default=parameters),
        outside=parameters - sum(layers),
        head=sum(p.numel() for p in head.parameters()) if trains_head else 0,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        compute_bytes=size,
        token_bytes=_saved_per_token(config, compute),
        cache_bytes=attention_sizes(config)[1] * size,
        quantised=sum(m.weight.numel() for m in linear) if bits else 0,
        quantised_bytes=_QUANTISED_BYTES[bits] if bits else 0.0,
        form=choice.planned(model),
        form_in_words=choice.described(model),
    )


def _saved_per_token(config: Any, compute: str) -> float:
    long = min(_TOKENS, getattr(config.get_text_config(), "max_position_embeddings", None) or _TOKENS)
    short = long // 3  # two lengths, so that whatever does not grow with tokens cancels
    one, two = (_saved(config, n, long, compute) - _saved(config, n, short, compute) for n in (1, 2))
    return (two - one) / (long - short)


def _saved(config: Any, layers: int, tokens: int, compute: str) -> int:
    """Bytes that autograd saves in one forward pass of a small copy of an architecture."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers, text.vocab_size = layers, 64
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    # a token saves the activations of the experts it is routed to
    experts = max(8, getattr(text, "num_experts_per_tok", None) or 1)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), experts))
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).train()
    with torch.autocast("cpu", getattr(torch, compute), enabled=compute != "float32"):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        return saved_bytes(model, lambda: model.get_decoder()(input_ids=ids, use_cache=False))


def saved_bytes(model: torch.nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes that autograd saves in a forward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Any] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # kept alive, so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in saved.values())


def largest_micro_batch(geometry: BatchGeometry, prompt: int, longest: int, form: Form, budget: int | None) -> int:
    """Tokens in the largest micro-batch, with prompts and completions of maximal length."""
    rows = min(geometry.micro_batch_size, geometry.trained_share)
    groups = rows if form == "padded" else ceil_div(rows, geometry.num_generations)
    tokens = groups * prompt + rows * longest
    return tokens if budget is None else min(tokens, max(budget, prompt + longest))


def refuse_size(size: int, config: Any, model: ModelSizes, layout: MemoryLayout, settings: Mapping[str, Any]) -> None:
    """Raise the GrpoExtError of a run in which `size` processes cannot share a micro-batch."""
    deepspeed = layout.engine in ("zero2", "zero3")
    check_sequence_parallel({**settings, "deepspeed": deepspeed, "sequence_parallel_size": size})
    refuse_heads(config, size, layout.processes)
    refuse_other_forms(size, model.form, model.form_in_words)


def sizes_taken(config: Any, model: ModelSizes, layout: MemoryLayout, settings: Mapping[str, Any]) -> list[int]:
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
    model: str,
    geometry: BatchGeometry,
    settings: Mapping[str, Any],
    engine: str = "ddp",
    prompt: int | None = None,
    device: float | None = None,
) -> tuple[str, Table]:
    """Describe what the memory depends on, and estimate the memory per device by part.

    `model` is an id, folder or config.json; `prompt` is the tokens of the longest prompt, None if unknown; `device` is
    the GB of a device.
    """
    # bfloat16 is TRL's default
    compute = "float16" if settings.get("fp16") else "bfloat16" if settings.get("bf16", True) else "float32"
    lora_rank = settings.get("lora_r", 16) if settings.get("use_peft") else None
    longest, longest_prompt = settings.get("max_completion_length") or 512, prompt or _PROMPT_TOKENS
    forms, config = forms_of(settings.get("forward", "auto")), load_config(model)
    bits = next((n for n in _QUANTISED_BYTES if settings.get(f"load_in_{n}bit")), None)
    sizes = measure(config, compute=compute, lora_rank=lora_rank, bits=bits, forms=forms)
    tokens = largest_micro_batch(geometry, longest_prompt, longest, sizes.form, settings.get("micro_batch_tokens"))
    layout = _layout_of(geometry, settings, engine, tokens, longest_prompt + longest)
    shared = layout.sequence_parallel_size
    refuse_size(shared, config, sizes, layout, settings)
    lines = [
        f"Model: {sizes.parameters / 1e6:,.1f}M parameters, {sizes.trained / 1e6:,.1f}M trained; saved activations "
        f"{in_units(sizes.token_bytes)} per token and layer",
        f"Forward: {sizes.form_in_words}",
        f"Prompts: up to {longest_prompt} tokens ({'assumed' if prompt is None else 'as set'}); completions: up to "
        f"{longest}",
        f"Largest micro-batch: {tokens:,} tokens",
    ]
    if shared > 1:
        numbers = exchanged_numbers(config, shared, half=sizes.compute_bytes < _WEIGHT_BYTES)
        sent = layout.slice_tokens * numbers * sizes.compute_bytes * (shared - 1) / shared
        what = "two all-to-alls (query, key and value; output)"
        lines.append(f"Exchange: in each layer and pass a device sends {in_units(sent)} in {what}")
    if device is not None:
        taken = sizes_taken(config, sizes, layout, settings)
        lines.append(what_fits(sizes, layout, longest_prompt + longest, taken, device))
    lines.append(f"Expected memory per device, {engine} on {counted(geometry.num_processes, 'process')}:")
    return "\n".join(lines), _table(memory_of(sizes, layout), "rollout" if settings.get("use_vllm") else None)


def teacher_bytes(settings: Mapping[str, Any]) -> int:
    """Bytes of a teacher's weights, in the type in which it is loaded; 0 without one."""
    if (teacher := settings.get("teacher_model")) is None:
        return 0
    config, load = load_config(teacher, "teacher_model"), settings.get("teacher_model_init_kwargs") or {}
    load = json.loads(load) if isinstance(load, str) else load
    kind = load.get("dtype", "float32")
    kind = config.dtype if kind == "auto" else getattr(torch, str(kind).removeprefix("torch."))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters() * (kind or torch.float32).itemsize


def _layout_of(
    geometry: BatchGeometry, settings: Mapping[str, Any], engine: str, tokens: int, completion: int
) -> MemoryLayout:
    lag = settings.get("rollout_lag")
    return MemoryLayout(
        engine,
        geometry.num_processes,
        tokens,
        # vLLM's own memory is not counted
        sampled_tokens=0 if settings.get("use_vllm") else geometry.generate_size * completion,
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
