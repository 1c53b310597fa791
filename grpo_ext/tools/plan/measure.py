"""The memory of a run per device, for `grpo-ext plan` of a model, before anything is started.

The saved activations are counted, not guessed: two layers of the architecture, with random weights and a tiny
vocabulary, run forward once on the CPU, and every tensor autograd keeps is added up.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table

from ...batching.micro_batches import Form
from ...batching.sizes import BatchGeometry, ceil_div
from ...checks.model import find_model
from ...config import forms_of
from ...errors import ConfigError
from ...forward.architecture import attention_sizes
from ...forward.choice import ForwardChoice
from .memory import MemoryLayout, ModelSizes, count, in_units, memory_of

HUB = "https://huggingface.co"
_PROMPT_TOKENS = 512  # assumed
_TOKENS = 192  # of the forward pass that is measured
_QUANTISED_BYTES = {4: 0.5 + 4 / 64, 8: 1.0}  # 4 bits have a float32 factor for every 64 weights


def load_config(model: str) -> Any:
    """The configuration of a model id, a folder, or a JSON file.

    Raises:
        ConfigError: it cannot be read, there is no such model, or it is not of a language model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        if model.endswith(".json"):
            config = AutoConfig.for_model(**json.loads(Path(model).read_text()))
        else:
            find_model(model, {})
            config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        of_hub = not (model.endswith(".json") or Path(model).exists() or model.count("/") > 1)
        remedy = (
            f"without a network, name a folder of the model, or its configuration alone, which is {HUB}/{model}/raw/"
            "main/config.json: --model_name_or_path path/to/config.json."
        )
        raise ConfigError(
            f"model_name_or_path={model!r} gives no configuration ({reason}); "
            + (remedy if of_hub else "name a model or a config.json.")
        ) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model_name_or_path={model!r} is a {type(config).__name__}, and memory is counted for models of text "
            "alone; name the text model inside."
        )
    return config


def _saved(config: Any, layers: int, tokens: int, compute: str) -> int:
    """Bytes autograd keeps of one forward pass of a small copy of an architecture."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers, text.vocab_size = layers, 64
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):  # a token keeps what its chosen ones do
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), max(8, getattr(text, "num_experts_per_tok", None) or 1)))
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # kept alive, so that no other tensor gets its address
        return tensor

    half = torch.autocast("cpu", getattr(torch, compute), enabled=compute != "float32")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), half:
        model.get_decoder()(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def _saved_per_token(config: Any, compute: str) -> float:
    """Bytes per token and layer that autograd keeps."""
    long = min(_TOKENS, getattr(config.get_text_config(), "max_position_embeddings", None) or _TOKENS)
    short = long // 3  # two lengths, so that what does not grow with tokens drops out

    def per_token(layers: int) -> float:
        return (_saved(config, layers, long, compute) - _saved(config, layers, short, compute)) / (long - short)

    return per_token(2) - per_token(1)


def _largest_layer(model: Any, layers: int) -> int:
    """Parameters of the largest decoder layer; 0 where none is known."""
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == layers]
    return max((sum(p.numel() for p in layer.parameters()) for stack in stacks for layer in stack), default=0)


def measure(
    config: Any,
    *,
    weights: str = "float32",
    compute: str = "bfloat16",
    lora_rank: int | None = None,
    bits: int | None = None,
    forms: Sequence[Form] = ("packed", "prefix"),
) -> ModelSizes:
    """What counts of an architecture, without its weights.

    Args:
        weights: type of the weights; compute: type of a forward pass.
        lora_rank: only adapters of this rank on every linear layer are trained.
        bits: the linear layers are held in 4 or 8 bits (bitsandbytes).
        forms: that the settings allow, the best first.
    """
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    trained, head = parameters, model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    if lora_rank is not None:
        trained = sum(lora_rank * (m.in_features + m.out_features) for m in linear)
    saved = _saved_per_token(config, compute)
    size, choice = getattr(torch, compute).itemsize, ForwardChoice(forms, torch.device("cpu"))
    return ModelSizes(
        parameters=parameters,
        trained=trained,
        largest_layer=_largest_layer(model, text.num_hidden_layers) or parameters,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        weight_bytes=getattr(torch, weights).itemsize,
        compute_bytes=size,
        token_bytes=saved,
        cache_bytes=attention_sizes(config)[1] * size,
        quantised=sum(m.weight.numel() for m in linear) if bits else 0,
        quantised_bytes=_QUANTISED_BYTES[bits] if bits else 0.0,
        form=choice.form(model),
        form_in_words=choice.described(model),
    )


def largest_micro_batch(geometry: BatchGeometry, prompt: int, longest: int, form: Form, budget: int | None) -> int:
    """Tokens of the largest micro-batch, with prompts and completions of the greatest lengths."""
    rows = min(geometry.micro_batch_size, ceil_div(geometry.global_batch_size, geometry.num_processes))
    groups = rows if form == "padded" else ceil_div(rows, geometry.num_generations)
    tokens = groups * prompt + rows * longest
    return tokens if budget is None else min(tokens, max(budget, prompt + longest))


def memory_table(model: ModelSizes, layout: MemoryLayout) -> Table:
    """Memory per device, by part."""
    table = Table("part", Column("memory", justify="right"))
    for name, size in memory_of(model, layout).items():
        total = name in ("training", "rollout")
        if size or total:
            table.add_row(f"[bold]{name}[/bold]" if total else name, in_units(size))
    return table


def expected_memory(
    model: str, geometry: BatchGeometry, settings: Mapping[str, Any], engine: str = "ddp", prompt: int | None = None
) -> tuple[str, Table]:
    """What the memory depends on, in words, and the memory per device by part.

    Args:
        model: id, folder or config.json.
        settings: of the run, by the names of GRPOConfig and of trl's ModelConfig.
        prompt: tokens of the longest prompt; None assumes 512.

    Raises:
        ConfigError: a configuration that cannot be read, an unknown engine.
    """
    # bfloat16 is TRL's default
    compute = "float16" if settings.get("fp16") else "bfloat16" if settings.get("bf16", True) else "float32"
    lora_rank = settings.get("lora_r", 16) if settings.get("use_peft") else None
    longest = settings.get("max_completion_length") or 512
    forms = forms_of(settings.get("forward", "auto"))
    bits = next((n for n in _QUANTISED_BYTES if settings.get(f"load_in_{n}bit")), None)
    sizes = measure(load_config(model), compute=compute, lora_rank=lora_rank, bits=bits, forms=forms)
    budget, longest_prompt = settings.get("micro_batch_tokens"), prompt or _PROMPT_TOKENS
    layout = MemoryLayout(
        engine,
        geometry.num_processes,
        largest_micro_batch(geometry, longest_prompt, longest, sizes.form, budget),
        min(geometry.rollout_chunk_size, geometry.rollout_batch_size),
        longest_prompt + longest,
        checkpointing=bool(settings.get("gradient_checkpointing", True)),
        reference=settings.get("beta", 0.0) > 0 and not settings.get("use_peft"),
        bitwise=bool(settings.get("bitwise_invariant", False)),
        lag=settings.get("rollout_lag") or 0,
    )
    return (
        f"Model: {count(sizes.parameters)} parameters, {count(sizes.trained)} trained; saved activations "
        f"{in_units(sizes.token_bytes)} per token and layer\n"
        f"Forward: {sizes.form_in_words}\n"
        f"Prompts: up to {longest_prompt} tokens ({'assumed' if prompt is None else 'as given'}); completions: up to "
        f"{longest}\n"
        f"Largest micro-batch: {layout.tokens:,} tokens\n"
        f"Expected memory per device, {layout.engine} on {layout.processes}:"
    ), memory_table(sizes, layout)
