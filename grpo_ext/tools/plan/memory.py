"""What a training step and a rollout take of a device's memory, from a model's sizes: arithmetic, no model is loaded.

Sizes in bytes per device. The saved activations per token are measured on two layers (tools.plan.measure); the rest
follows from the number of parameters and from what an engine shards. Used by `grpo-ext plan` where a model is named.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...batching.micro_batches import Form
from ...errors import ConfigError
from ...forward.tiled_log_probs import TILE

ENGINES = ("ddp", "zero2", "zero3", "fsdp2")


@dataclass(frozen=True)
class ModelSizes:
    """What counts of a model.

    Attributes:
        parameters: all weights; trained: those with a gradient.
        largest_layer: parameters of the largest layer, which is gathered as a whole.
        layers, hidden, vocabulary: of the configuration.
        weight_bytes: per parameter, as it is trained (4: float32).
        compute_bytes: per number in a forward (2: autocast to a half precision).
        token_bytes: saved per token and layer for the backward pass.
        cache_bytes: of keys and values per token of a sequence, all layers, while sampling.
        quantised: parameters that are held in `quantised_bytes` each.
        form: how its completions run; form_in_words: that, and why not in another form.
    """

    parameters: int
    trained: int
    largest_layer: int
    layers: int
    hidden: int
    vocabulary: int
    weight_bytes: int
    compute_bytes: int
    token_bytes: float
    cache_bytes: float
    quantised: int = 0
    quantised_bytes: float = 0.0
    form: Form = "packed"
    form_in_words: str = ""


@dataclass(frozen=True)
class MemoryLayout:
    """How it is run.

    Attributes:
        engine: one of `ENGINES`; processes: devices that share what it shards.
        tokens: of the largest micro-batch, prompt included.
        sampled_rows: completions per `generate` call; sampled_tokens: the longest of them, prompt included.
        checkpointing: gradient checkpointing.
        reference: a reference model of its own is held.
        bitwise: gradient sums of 64-bit integers.
        lag: rollout batches that are sampled ahead, on the device that trains.
        head_tile: logits that the head computes at a time.
    """

    engine: str
    processes: int
    tokens: int
    sampled_rows: int
    sampled_tokens: int
    checkpointing: bool = True
    reference: bool = False
    bitwise: bool = False
    lag: int = 0
    head_tile: int = TILE[0] * TILE[1]


def memory_of(model: ModelSizes, layout: MemoryLayout) -> dict[str, float]:
    """Bytes per device by part, with the totals "training" and "rollout".

    Raises:
        ConfigError: unknown engine.
    """
    if layout.engine not in ENGINES:
        raise ConfigError(f"engine={layout.engine!r}: use one of {', '.join(ENGINES)}.")
    deepspeed = layout.engine in ("zero2", "zero3")
    half = model.compute_bytes < model.weight_bytes
    # DeepSpeed holds weights and gradients in the half precision, and float32 copies with the optimizer's shards
    width = model.compute_bytes if deepspeed else model.weight_bytes
    masters = model.weight_bytes if deepspeed and half else 0
    plain = model.parameters - model.quantised
    whole = plain * width + model.quantised * model.quantised_bytes
    shards_weights = layout.engine in ("zero3", "fsdp2")
    holders = layout.processes if layout.engine != "ddp" else 1  # of gradients and optimizer states
    # one layer in use and the next one being gathered
    gathered = 2 * model.largest_layer * model.compute_bytes if shards_weights else 0
    casts = plain * model.compute_bytes if half and not deepspeed else 0
    copies = (layout.lag + 1) * width * model.trained if layout.lag else 0
    tile = min(layout.tokens * model.vocabulary, layout.head_tile)
    parts = {
        "weights": whole / layout.processes + gathered if shards_weights else whole,
        "half-precision copies": 0 if shards_weights else casts,
        "reference": (whole / layout.processes if shards_weights else whole) if layout.reference else 0,
        "gradients": (width if deepspeed else 4) * model.trained / holders,
        "optimizer": (8 + masters) * model.trained / holders,
        "bitwise sums": 8 * model.trained if layout.bitwise else 0,
        "activations": _activations(model, layout),
        # float32 values and what becomes of them; in half precision the products too
        "logits": tile * (2 * 4 + (model.compute_bytes if model.compute_bytes < 4 else 0)),
        # of those that are due later, and of the one that is late
        "weights that sample": copies,
        "key-value cache": model.cache_bytes * layout.sampled_rows * layout.sampled_tokens,
    }
    held = sum(parts[n] for n in ("weights", "reference", "optimizer", "weights that sample"))
    step = sum(parts[n] for n in ("half-precision copies", "gradients", "bitwise sums", "activations", "logits"))
    # while it generates, TRL gathers the weights of ZeRO-3; FSDP2 does layer by layer
    sampling = parts["key-value cache"] + (whole if layout.engine == "zero3" else 0)
    if layout.lag:  # both at a time
        return {**parts, "training": held + step + sampling, "rollout": held + step + sampling}
    return {**parts, "training": held + step, "rollout": held + sampling}


def _activations(model: ModelSizes, layout: MemoryLayout) -> float:
    if layout.checkpointing:  # the input of every layer, and one layer that is run again
        return layout.tokens * (model.hidden * model.weight_bytes * model.layers + model.token_bytes)
    return layout.tokens * model.token_bytes * model.layers


def in_units(size: float) -> str:
    """Bytes in the largest unit of which there is one: "3.2 MiB"."""
    power = max((n for n in (1, 2, 3) if size >= 1024**n), default=0)
    return f"{size / 1024**power:,.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def count(number: float) -> str:
    """A count of parameters: "0.5M", "135M", "7.6B"; below 100,000 as it is."""
    if number < 1e5:
        return f"{number:,.0f}"
    value, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{value:.1f}{unit}" if value < 10 else f"{value:,.0f}{unit}"
