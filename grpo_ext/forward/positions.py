"""Rotary positions whose frequencies depend on the longest sequence of a forward (`longrope`, `dynamic`).

Differs from TRL, where the same completion then has other log-probabilities in another micro-batch: the frequencies are
set once, to those of the longest sequence the run can have, in policy and reference alike. Used once, while the trainer
is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FAR = 2**20  # a length in tokens beyond every switch


def rope_parameters(config: Any) -> dict[str | None, dict[str, Any]]:
    """The rotary settings by layer type (None where all layers share one); empty without rotary positions."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return {None: parameters}
    return {kind: values for kind, values in parameters.items() if isinstance(values, dict)}


def covered_length(config: Any) -> int | None:
    """Tokens that a model with rotary positions was made for, scaling included; None where there is no limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    lengths = [limit]
    for values in rope_parameters(config).values():
        if "dynamic" in str(values.get("rope_type")):
            return None  # dynamic scaling covers any length
        factor = values.get("factor")
        if isinstance(factor, (int, float)):
            lengths.append(int(factor * (values.get("original_max_position_embeddings") or limit)))
    return max(lengths)


def _changing(model: nn.Module) -> Iterator[tuple[str, Any, str | None, int]]:
    """The rotary modules whose frequencies change with the length of a forward, once for each layer type they serve.

    Yields:
        The module as text, the module, the layer type (None where all share one), and the longest sequence in tokens
        that does not change them.
    """
    for path, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if config is None or "rotary" not in type(module).__name__.lower():
            continue
        for kind, values in rope_parameters(config).items():
            scaling = str(values.get("rope_type"))
            if scaling == "longrope" or "dynamic" in scaling:
                switch = values["original_max_position_embeddings"] if scaling == "longrope" else None
                text = f"{path} ({type(module).__name__}, {scaling})"
                yield text, module, kind, switch or config.max_position_embeddings


def _is_pinned(module: Any, kind: str | None) -> bool:
    scaling = getattr(module, "rope_type", None)
    return (scaling.get(kind) if isinstance(scaling, dict) else scaling) == "default"


def depends_on_length(model: nn.Module, length: int = _FAR) -> str | None:
    """The first rotary module whose angles depend on the longest of up to `length` tokens, as text; None if none do."""
    modules = _changing(model)
    return next((text for text, rope, kind, switch in modules if length > switch and not _is_pinned(rope, kind)), None)


def _pin(model: nn.Module, length: int) -> None:
    """Set the frequencies to those of a forward over `length` tokens, for every forward from now on."""
    for _, module, kind, _ in _changing(model):
        values, prefix = rope_parameters(module.config)[kind], "" if kind is None else f"{kind}_"
        if "short_mscale" in values:
            continue  # Phi-MoE, which also changes the scale, in every forward
        extra = {} if kind is None else {"layer_type": kind}
        frequencies, _ = ROPE_INIT_FUNCTIONS[values["rope_type"]](module.config, None, seq_len=length, **extra)
        getattr(module, f"{prefix}inv_freq").copy_(frequencies)
        # transformers updates the frequencies of other kinds in every forward
        module.rope_type = "default" if kind is None else {**module.rope_type, kind: "default"}


def settle_rope(models: list[Any], longest: Callable[[], int | None]) -> tuple[str | None, str | None]:
    """Give every forward of a run the same rotary frequencies.

    Args:
        models: the policy, and the reference where there is one.
        longest: tokens of the longest prompt and completion the run can have, or None; asked only where it matters.

    Returns:
        What was done, and what still depends on the micro-batch; as sentences, None where there is nothing to say.
    """
    name = next((text for text, *_ in _changing(models[0])), None)
    if name is None:
        return None, None
    length = longest()
    if length is None:
        return None, (
            f"the rotary positions of {name} depend on the longest sequence of a micro-batch, and the longest of this "
            "run is not known (a stream, a transform, an environment, or max_completion_length=None); use a data set "
            "with a length and set max_completion_length, or a rope_type that does not depend on it"
        )
    if all(length <= switch and not _is_pinned(rope, kind) for m in models for _, rope, kind, switch in _changing(m)):
        return None, None  # the whole run stays below the switch
    for model in models:
        _pin(model, length)
    left = next(filter(None, (depends_on_length(model) for model in models)), None)
    if left is not None:
        return None, (
            f"the rotary positions of {left} depend on the longest sequence of a micro-batch, and sequences of this "
            f"run reach {length} tokens, beyond where they change; shorten prompts or max_completion_length, or use "
            "another rope_type"
        )
    return (
        f"The rotary positions of {name} depend on the longest sequence of a forward; all forwards of this run use "
        f"those of {length} tokens, the longest prompt and max_completion_length."
    ), None


def accepts_positions(model: Any) -> bool:
    """Whether the model's forward takes `position_ids`."""
    return "position_ids" in inspect.signature(model.forward).parameters


def positions_of(
    model: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, images: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """The `position_ids` of a batch in TRL's layout: (B, L), or (3, B, L) where images have rows and columns.

    Args:
        images: what the model is given of images; the pixels need not be among them.

    Returns:
        None for a model that takes none.
    """
    if not accepts_positions(model):
        return None
    counted_BL = position_ids(mask_BL)
    index: Callable[..., Any] | None = getattr(getattr(model, "base_model", model), "get_rope_index", None)
    if index is None:
        return counted_BL
    known = {name: value for name, value in images.items() if name in inspect.signature(index).parameters}
    if "image_grid_thw" not in known:
        return counted_BL.expand(3, *counted_BL.shape)
    return index(ids_BL, attention_mask=mask_BL, **known)[0]


def position_ids(attention_mask_BT: torch.Tensor) -> torch.Tensor:
    """Positions that count real tokens only, so that padding does not move a row (B, T), int64."""
    return attention_mask_BT.long().cumsum(-1).sub(1).clamp(min=0)
